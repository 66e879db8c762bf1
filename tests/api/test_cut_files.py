"""Files and buckets that are truncated while they are read: an error names the file, and there is no signal."""

import itertools
import os
import re
import shutil
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmpy import CheckpointError, DeviceError, SamplingParams, WeightsMissingError, _core
from llmpy.engine import loading
from llmpy.weights.updates import stored_tensors

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)


@pytest.fixture
def copy(tiny_model, tmp_path):
    """A copy of the model's directory that a test may damage, and its weight file."""
    path = tmp_path / "copy"
    shutil.copytree(tiny_model, path)
    return path, path / "model.safetensors"


def outcome(llm):
    sample = llm.generate([[3, 4, 5]], GREEDY)[0].outputs[0]
    return sample.token_ids, sample.sampled.raw.tobytes()


def cut_off(file, size):
    """The text of the error."""
    return rf"^{re.escape(file.name)}: tensor [\w.]+: data: wanted a file of \d+ bytes, have {size}; it was cut off while"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_that_is_cut_off_while_a_model_loads(open_tiny, copy, monkeypatch, dtype):
    path, file = copy
    open_files = _core.Checkpoint

    def open_and_cut(paths, **options):
        checkpoint = open_files(paths, **options)
        os.truncate(file, 5000)
        return checkpoint

    monkeypatch.setattr(loading._core, "Checkpoint", open_and_cut)
    with pytest.raises(CheckpointError, match=cut_off(file, 5000)) as caught:
        open_tiny(path, dtype=dtype)
    assert caught.value.file == str(file)


def test_a_file_that_is_cut_off_before_an_update_writes(open_tiny, copy):
    path, file = copy
    llm = open_tiny()
    before, sums = outcome(llm), llm.weight_checksum()
    for check_finite in (False, True):
        whole = file.read_bytes()
        pairs = stored_tensors(path)
        os.truncate(file, 5000)
        with pytest.raises(CheckpointError, match=cut_off(file, 5000)), llm.begin_update(check_finite=check_finite) as update:
            update.write_all(pairs)
        file.write_bytes(whole)
    assert outcome(llm) == before and llm.weight_checksum() == sums
    with pytest.raises(CheckpointError, match=r"wanted a file of \d+ bytes, have 100"):
        pairs = stored_tensors(path)
        os.truncate(file, 100)
        llm.compare_weights(pairs)


def test_a_file_that_is_cut_off_between_two_writes_leaves_torn_weights(open_tiny, copy):
    path, file = copy
    llm = open_tiny()
    before, whole = outcome(llm), file.read_bytes()
    pairs = stored_tensors(path)
    with pytest.raises(CheckpointError, match=cut_off(file, 5000)), llm.begin_update() as update:
        update.write_all(pairs[:1])
        os.truncate(file, 5000)
        update.write_all(pairs[1:])
    with pytest.raises(WeightsMissingError):
        llm.generate([[3, 4, 5]], GREEDY)
    file.write_bytes(whole)
    llm.update_weights(path)
    assert outcome(llm) == before


def test_a_file_that_is_cut_off_at_any_time(open_tiny, copy):
    """An update completes or raises, wherever the file is truncated."""
    path, file = copy
    llm, whole = open_tiny(), file.read_bytes()
    before, num_failed = outcome(llm), 0
    for i in itertools.count():
        if (i >= 30 and num_failed) or i == 3000:
            break
        file.write_bytes(whole)
        cutter = threading.Thread(target=lambda delay=i % 30 * 0.0002: (time.sleep(delay), os.truncate(file, 3000)))
        cutter.start()
        try:
            llm.update_weights(path)
        except CheckpointError:
            num_failed += 1
        finally:
            cutter.join()
    assert num_failed
    file.write_bytes(whole)
    llm.update_weights(path)
    assert outcome(llm) == before


def test_tensors_larger_than_what_is_read_at_once(open_tiny, write_model, tmp_path):
    """8 MiB: an update from files writes in pieces the same bytes that a load writes at once."""
    sizes = {"vocab_size": 40000, "hidden_size": 64, "head_dim": 16, "intermediate_size": 40000}
    paths = [tmp_path / name for name in "ab"]
    for path, scale in zip(paths, (1.0, 3.0), strict=True):
        path.mkdir()
        write_model(path, scale, **sizes)
    for dtype in ("float32", "bfloat16"):
        llm, fresh = open_tiny(paths[0], dtype=dtype), open_tiny(paths[1], dtype=dtype)
        assert llm.weight_checksum() != fresh.weight_checksum()
        assert set(llm.compare_weights(paths[0]).different) == set()
        llm.update_weights(paths[1])
        assert llm.weight_checksum() == fresh.weight_checksum() and outcome(llm) == outcome(fresh)


def test_a_bucket_that_is_cut_off(open_tiny, copy):
    llm = open_tiny()
    before = outcome(llm)
    name, array = max(load_file(copy[1]).items(), key=lambda item: item[1].nbytes)
    descriptor = os.memfd_create("bucket")
    os.write(descriptor, bytes(64) + np.ascontiguousarray(array).tobytes())
    item = (name, descriptor, 64, str(array.dtype), array.shape, None)
    with llm.begin_update(partial=True) as update:
        update.write_shared([item])
        os.ftruncate(descriptor, 64 + array.nbytes - 1)
        end = 64 + array.nbytes
        text = rf"weight '{name}': wanted bytes 64 to {end} of the bucket, have {end - 1}; do not change"
        with pytest.raises(DeviceError, match=text):
            update.write_shared([item])
    assert outcome(llm) == before
    os.close(descriptor)
