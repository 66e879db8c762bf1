"""A cache on disk behind the one in host memory: ids and logprob bits are those of a request that is alone, without a cache;
also after a restart, in a second engine, and with damaged files."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modules import load
from safetensors.numpy import load_file

from llmpy import ConfigError, kv

tiers = load(Path(__file__).with_name("test_tiers.py"))
bits, open_llm, params, prompts, run_twice = tiers.bits, tiers.open_llm, tiers.params, tiers.prompts, tiers.run_twice
Make = Callable[[str, str], Path]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def disk_options(folder: Path, **options: Any) -> dict[str, Any]:
    """Options of an engine whose host cache is so small that most blocks have to go to disk."""
    return {"host_cache_bytes": "512KiB", "disk_cache": {"path": folder, "bytes": "64MiB"}, "prefix_cache_seed": 3} | options


@functools.cache
def alone(path: Path, device: str, **options: Any) -> list[tuple[bytes, ...]]:
    with open_llm(path, device, enable_prefix_caching=False, **options) as llm:
        return [bits(llm.generate([prompt], [params(i)], use_tqdm=False)[0]) for i, prompt in enumerate(prompts())]


@functools.cache
def pool_bytes(path: Path, device: str, blocks: int, **options: Any) -> int:
    with open_llm(path, device, **options) as llm:
        return int(blocks * tiers.block_bytes(llm))


def compare(path: Path, device: str, blocks: int, folder: Path, **options: Any) -> None:
    wanted, size_bytes = alone(path, device, **options), pool_bytes(path, device, blocks, **options)
    for is_warm in (False, True):
        with open_llm(path, device, size_bytes, **disk_options(folder, host_cache_bytes=size_bytes, **options)) as llm:
            found, stats = run_twice(llm, prompts())
            assert found == wanted * 2
            # On a busy machine the first engine may end before a file is written.
            assert not is_warm or (stats.disk_cache_hits > 300 and stats.disk_loaded_bytes > 0)
            assert stats.allocations_since_warmup == 0 and stats.kv_blocks_free == stats.kv_blocks_total
            assert stats.disk_errors == stats.disk_bad_files == stats.disk_misses == 0
    assert files(folder) and not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize("model", tiers.MODELS, ids=lambda model: "-".join(model[:3]))
def test_a_cache_on_disk_changes_no_bit(
    tiny_model: Make, model: tuple[str, str, str, int], device: str, tmp_path: Path
) -> None:
    compare(tiny_model(*model[:2]), device, model[3], tmp_path / "new" / "cache", kv_cache_dtype=model[2])


def test_recurrent_states_come_from_disk(recurrent_model: Path, device: str, tmp_path: Path) -> None:
    compare(recurrent_model, device, 40, tmp_path)


def test_a_restart_finds_what_the_pool_had(tiny_model: Make, device: str, tmp_path: Path) -> None:
    path, prompt = tiny_model("llama", "float32"), prompts()[-1]
    options = disk_options(tmp_path, host_cache_bytes="4MiB")
    for hits in (0, 128):
        with open_llm(path, device, **options) as llm:
            output = llm.generate([prompt], [params(0)], use_tqdm=False)[0]
            assert output.num_cached_tokens == llm.stats().disk_cache_hits == hits
            reset_hits = llm.stats().disk_cache_hits
    assert len(files(tmp_path)) == 8
    with open_llm(path, device, **options) as llm:
        llm.reset_prefix_cache()
        assert llm.generate([prompt], [params(0)], use_tqdm=False)[0].num_cached_tokens == 0 and reset_hits == 128


def test_files_of_another_model_are_not_found(tiny_model: Make, device: str, tmp_path: Path) -> None:
    prompt = prompts()[-1]
    for name, dtype in (("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "float32")):
        with open_llm(tiny_model(name, dtype), device, **disk_options(tmp_path)) as llm:
            assert llm.generate([prompt], [params(0)], use_tqdm=False)[0].num_cached_tokens == 0
    assert len(list(tmp_path.iterdir())) == 3


def test_damaged_files_are_computed_again(tiny_model: Make, device: str, tmp_path: Path) -> None:
    path, prompt = tiny_model("llama", "float32"), prompts()[-1]
    with open_llm(path, device, **disk_options(tmp_path)) as llm:
        wanted = bits(llm.generate([prompt], [params(0)], use_tqdm=False)[0])
    for file in files(tmp_path):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    with open_llm(path, device, **disk_options(tmp_path)) as llm:
        output = llm.generate([prompt], [params(0)], use_tqdm=False)[0]
        assert bits(output) == wanted and output.num_cached_tokens == 0
        stats = llm.stats()
        assert stats.disk_bad_files == stats.disk_misses == 8 and stats.disk_loaded_bytes == 0


def test_large_pages_go_past_the_page_cache(tiny_model: Make, device: str, tmp_path: Path) -> None:
    path, prompt = tiny_model("llama", "float32"), (prompts()[-1] * 3)[:300]
    options = disk_options(tmp_path, host_cache_bytes="8MiB", block_size=64, max_model_len=512)
    found = []
    for _ in range(2):
        with open_llm(path, device, **options) as llm:
            found.append(llm.generate([prompt], [params(0)], use_tqdm=False)[0])
    assert bits(found[0]) == bits(found[1]) and found[1].num_cached_tokens == 256
    sizes = [file.stat().st_size for file in files(tmp_path)]
    assert len(sizes) == 4 and all(size % 4096 == 0 and size > 64 << 10 for size in sizes)


KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
from llmpy import LLM, SamplingParams

model, options, prompts, folder, n_kills = json.loads(sys.argv[1])
settings = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)

def bits(llm, prompt):
    sample = llm.generate([prompt], [settings], use_tqdm=False)[0].outputs[0]
    return sample.token_ids_array.tobytes() + sample.sampled.raw.tobytes()

def child(work):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)

def live():
    while True:
        with LLM(model, **options) as llm:
            for prompt in prompts:
                bits(llm, prompt)

def alone():
    with LLM(model, **options | {"disk_cache": None, "host_cache_bytes": 0, "enable_prefix_caching": False}) as llm:
        Path(folder + "-wanted").write_text(json.dumps([bits(llm, prompt).hex() for prompt in prompts]))

def look():
    wanted = json.loads(Path(folder + "-wanted").read_text())
    with LLM(model, **options) as llm:
        assert [bits(llm, prompt).hex() for prompt in prompts] == wanted
        stats = llm.stats()
        assert stats.disk_bad_files == stats.disk_errors == 0, stats
        with open(folder + "-hits", "a") as file:
            print(stats.disk_cache_hits, file=file)
    assert not list(Path(folder).rglob("*.tmp"))

random.seed(1)
assert os.waitpid(child(alone), 0)[1] == 0
for _ in range(n_kills):
    pid = child(live)
    time.sleep(random.uniform(0.03, 0.4))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert os.waitpid(child(look), 0)[1] == 0
"""
"""A process without threads whose children have engines, which it kills."""


@pytest.mark.slow
def test_a_killed_process_leaves_whole_large_files(tiny_model: Make, tmp_path: Path) -> None:
    """With files past the page cache; KILLS is the number of kills."""
    folder, n_kills = tmp_path / "cache", int(os.environ.get("KILLS", "8"))
    options = tiers.OPTIONS | disk_options(folder, host_cache_bytes="1MiB", block_size=64, max_model_len=512)
    options |= {"device": "cpu", "kv_cache_memory_bytes": 2 << 20, "disk_cache": {"path": str(folder), "bytes": "2MiB"}}
    chats = [[3 + (i * 7 + j) % 120 for j in range(400)] for i in range(8)]
    work = json.dumps([str(tiny_model("llama", "float32")), options, chats, str(folder), n_kills])
    done = subprocess.run([sys.executable, "-c", KILLED, work], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    hits = [int(line) for line in (tmp_path / "cache-hits").read_text().split()]
    assert len(hits) == n_kills and sum(hits) > 0
    sizes = [file.stat().st_size for file in files(folder)]
    assert sizes and all(size % 4096 == 0 and size > 64 << 10 for size in sizes)


def test_without_a_seed_the_files_go_with_the_engine(tiny_model: Make, device: str, tmp_path: Path) -> None:
    path = tiny_model("llama", "float32")
    size_bytes = pool_bytes(path, device, 20)
    with open_llm(path, device, size_bytes, **disk_options(tmp_path, prefix_cache_seed=None, host_cache_bytes="128KiB")) as llm:
        run_twice(llm, prompts())
        assert files(tmp_path) and llm.stats().disk_stored_bytes > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_blocks_follow_the_weights(tiny_model: Make, device: str, tmp_path: Path, kind: str) -> None:
    """Behind an update an engine finds the blocks of the same weights alone, those of other engines and of earlier times."""
    path, prompt, folder = tiny_model("llama", "float32"), prompts()[-1], tmp_path / "cache"
    base, norm = load_file(path / "model.safetensors"), "model.norm.weight"
    other = {name: value + np.float32(0.01) for name, value in base.items()}
    updates: list[dict[str, Any]] = [other, {norm: base[norm]}, {norm: other[norm]}]
    store = {"disk_cache": {"path": folder, "bytes": "64MiB"}} if kind == "disk" else {"kv_connector": kv.Memory(64 << 20)}
    options = {"host_cache_bytes": "4MiB", "prefix_cache_seed": 3, **store}

    def run(number: int, **options: Any) -> tuple[int | None, tuple[bytes, ...]]:
        with open_llm(path, device, **options) as llm:
            for update in updates[:number]:
                llm.update_weights(update, partial=True)
            output = llm.generate([prompt], [params(0)], use_tqdm=False)[0]
            assert llm.stats().disk_errors == llm.stats().disk_misses == 0
        return output.num_cached_tokens, bits(output)

    wanted = [run(number)[1] for number in range(4)]
    assert wanted[1] == wanted[3] and len(set(wanted)) == 3
    for all_hits in (False, True):
        for number in range(4):
            assert run(number, **options) == (128 if all_hits or number == 3 else 0, wanted[number])


def test_wrong_options_name_themselves(tiny_model: Make, device: str, tmp_path: Path) -> None:
    path = tiny_model("llama", "float32")
    with pytest.raises(ConfigError, match="host_cache_bytes must be above 0 with disk_cache"):
        open_llm(path, device, disk_cache={"path": tmp_path, "bytes": "1GiB"})
    with pytest.raises(ConfigError, match="enable_prefix_caching must be True with disk_cache"):
        open_llm(path, device, **disk_options(tmp_path, enable_prefix_caching=False))
    with pytest.raises(ConfigError, match=r"disk_cache must be a dict with 'path'"):
        open_llm(path, device, **disk_options(tmp_path, disk_cache={"path": tmp_path}))
    with pytest.raises(ConfigError, match=r"disk_cache: bytes must be at least [0-9]+, a file of this model, got 99"):
        open_llm(path, device, **disk_options(tmp_path, disk_cache={"path": tmp_path, "bytes": 99}))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        open_llm(path, device, **disk_options(tmp_path, disk_cache={"path": tmp_path / "file", "bytes": "1MiB"}))


def test_the_folder_may_be_taken_away(tiny_model: Make, device: str, tmp_path: Path) -> None:
    """Writes fail and are counted; requests go on."""
    path, folder = tiny_model("llama", "float32"), tmp_path / "cache"
    size_bytes = pool_bytes(path, device, 20)
    wanted = alone(path, device)
    with open_llm(path, device, size_bytes, **disk_options(folder, host_cache_bytes="128KiB")) as llm:
        os.rename(folder, tmp_path / "other")
        for inner in (tmp_path / "other").iterdir():
            inner.rmdir()
        found, stats = run_twice(llm, prompts())
        assert found == wanted * 2 and stats.disk_errors > 0 and stats.disk_stored_bytes == 0
