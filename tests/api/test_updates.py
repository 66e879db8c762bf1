"""Live weight updates: an updated engine equals a new engine with the same weights, for every kind of update."""

import asyncio
import ctypes
import gc
import random
import re
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmpy import (
    EngineBusyError,
    EngineClosedError,
    InvalidRequestError,
    ModelNotFoundError,
    SamplingParams,
    UnsupportedError,
    WeightsMissingError,
    WeightUpdateError,
    _core,
)

torch = pytest.importorskip("torch")
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)
PROMPTS = [[3, 4, 5, 6, 7] * 8, [9, 8, 7], [100, 101] * 20]


@pytest.fixture(scope="module")
def other_model(tmp_path_factory, write_model):
    """Directory of a model of the same shape with other weights, and the weights."""
    path = write_model(tmp_path_factory.mktemp("other"))
    weights = {name: (1.25 * w + 0.01).astype(np.float32) for name, w in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors")
    return path, weights


@pytest.fixture
def pair(open_tiny, other_model):
    """An engine with old weights, one with new weights, and the new weights."""
    made = []

    def make(dtype="float32", **options):
        path, weights = other_model
        made.append((open_tiny(dtype=dtype, **options), open_tiny(path, dtype=dtype, **options), weights))
        return made[-1]

    return make


def outcome(llm):
    """Tokens and logprobs, bit for bit."""
    return [
        (output.outputs[0].token_ids, [float(x) for x in output.outputs[0].sampled.raw])
        for output in llm.generate(PROMPTS, GREEDY)
    ]


def tensors(weights, device="cpu", dtype=torch.float32):
    """The weights as torch tensors."""
    if device == "pinned":
        return {name: torch.from_numpy(w).to(dtype).pin_memory() for name, w in weights.items()}
    return {name: torch.from_numpy(w).to(dtype).to(device) for name, w in weights.items()}


def spread(tensor):
    """The same tensor with strides that are neither C's nor Fortran's, some of them far apart."""
    if tensor.dim() == 1:
        big = torch.zeros(2 * tensor.numel() + 3, dtype=tensor.dtype, device=tensor.device)
        view = big[3::2]
    else:
        rows, cols = tensor.shape
        view = torch.zeros(cols + 2, 3 * rows, dtype=tensor.dtype, device=tensor.device)[2:, ::3].t()
    view.copy_(tensor)
    return view


def places(device):
    """Where tensors can lie for an engine on a device."""
    return ["cpu"] if device == "cpu" else ["cpu", "pinned", device]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_updated_engine_equals_fresh_one(pair, device, dtype):
    old, new, weights = pair(dtype)
    wanted, sums = outcome(new), new.weight_checksum()
    before, first_sums = outcome(old), old.weight_checksum()
    assert before != wanted
    assert first_sums != sums
    for place in places(device):
        for kind in (torch.float32, torch.bfloat16, torch.float16):
            given = tensors(weights, place, kind)
            report = old.update_weights(given if place == "pinned" else {name: spread(t) for name, t in given.items()})
            assert old.compare_weights(given)
            # Double rounding differs from single rounding, so only the engine's own load is the reference.
            if kind is torch.float32:
                assert old.weight_checksum() == sums
                assert outcome(old) == wanted
            assert report.num_tensors == len(weights)
            assert report.num_bytes == sum(t.numel() * t.element_size() for t in given.values())
            old.update_weights(old_weights(old), version="back")
            assert old.weight_version == "back"
            assert old.weight_checksum() == first_sums
            assert outcome(old) == before


def old_weights(llm):
    """The weights that the engine was loaded with."""
    return llm.config.model


def test_any_order_and_bucketing(pair):
    old, new, weights = pair()
    wanted, sums, names = outcome(new), new.weight_checksum(), list(weights)
    for seed in range(3):
        random.Random(seed).shuffle(names)
        with old.begin_update() as update:
            update.write(names[0], weights[names[0]])
            update.write_all((name, weights[name]) for name in names[1:7])
            update.write_all({name: weights[name] for name in names[7:]})
        assert update.report.num_tensors == len(weights)
        assert old.weight_checksum() == sums
        assert outcome(old) == wanted
        old.update_weights(old_weights(old))


def test_sources(pair, other_model):
    old, new, weights = pair("bfloat16")
    sums = new.weight_checksum()
    shards = other_model[0].parent / "shards"
    shards.mkdir(exist_ok=True)
    names = sorted(weights)
    save_file({name: weights[name] for name in names[::2]}, shards / "a.safetensors")
    save_file({name: weights[name] for name in names[1::2]}, shards / "b.safetensors")
    parameters = {name: torch.nn.Parameter(t) for name, t in tensors(weights).items()}
    read_only = {name: np.frombuffer(w.tobytes(), np.float32).reshape(w.shape) for name, w in weights.items()}
    for source in (weights, list(weights.items()), iter(weights.items()), parameters, read_only, str(shards), shards):
        old.update_weights(source)
        assert old.weight_checksum() == sums
        old.update_weights(old_weights(old))
        assert old.weight_checksum() != sums


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_borrowed_tensors(pair, device, dtype):
    """The engine reads a trainer's matrices in place, keeps them alive, and gives the loan back at the next ordinary write."""
    old, new, weights = pair(dtype)
    wanted, own = outcome(new), old.memory()["weights"]
    kinds = {1: torch.float32, 2: getattr(torch, dtype)}  # vectors are stored as float32
    given = {name: t.to(kinds[t.dim()], copy=True) for name, t in tensors(weights).items()}
    if not device.startswith("cpu"):
        with pytest.raises(UnsupportedError, match="reads weights from its own memory alone; use borrow=False"):
            old.update_weights(given, borrow=True)
        return
    report = old.update_weights(given, borrow=True, version="theirs")
    assert set(report.borrowed) == {name for name, t in given.items() if t.dim() == 2} and old.weight_version == "theirs"
    vectors = 4 * sum(t.numel() for t in given.values() if t.dim() == 1)
    assert old.memory()["weights"] == vectors < own
    assert outcome(old) == wanted and old.weight_checksum() == new.weight_checksum()
    for tensor in given.values():  # a step of the optimizer
        tensor.mul_(1.5)
    old.update_weights(given, borrow=True)
    new.update_weights(given)
    given.clear()
    gc.collect()
    assert outcome(old) == outcome(new) != wanted and old.weight_checksum() == new.weight_checksum()
    old.sleep(level=1)
    old.wake_up()
    assert outcome(old) == outcome(new)
    old.update_weights(weights)
    new.update_weights(weights)
    assert outcome(old) == outcome(new) and old.memory()["weights"] == own


def test_what_is_not_borrowed(pair, device, other_model):
    """Another type, columns that are apart, and files are copied; the report tells."""
    old, new, weights = pair()
    if not device.startswith("cpu"):
        pytest.skip("only the CPU borrows")
    name = "model.layers.0.mlp.up_proj.weight"
    given = {**tensors(weights, dtype=torch.bfloat16), name: torch.from_numpy(weights[name])}
    assert old.update_weights(given, borrow=True).borrowed == [name]
    given[name] = spread(given[name])
    assert old.update_weights(given, borrow=True).borrowed == [] == old.update_weights(other_model[0], borrow=True).borrowed
    assert old.weight_checksum() == new.weight_checksum()


def test_a_torn_loan_is_kept_alive(pair, device):
    """After an aborted update the engine may still hold any of its tensors; a full update ends that."""
    old, new, weights = pair()
    if not device.startswith("cpu"):
        pytest.skip("only the CPU borrows")
    with pytest.raises(WeightUpdateError, match="not part of"), old.begin_update(borrow=True) as update:
        update.write_all(iter([(name, torch.from_numpy(w.copy())) for name, w in weights.items()]))
        update.write("nothing", torch.zeros(1))
    gc.collect()
    assert old.weight_checksum() == new.weight_checksum()
    with pytest.raises(WeightsMissingError):
        old.generate(PROMPTS, GREEDY)
    old.update_weights(weights)
    assert outcome(old) == outcome(new)


def test_numpy_bfloat16(pair):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    old, new, weights = pair("bfloat16")
    old.update_weights({name: w.astype(ml_dtypes.bfloat16) for name, w in weights.items()})
    matrices = [name for name, w in weights.items() if w.ndim == 2]  # vectors are stored as float32
    assert old.weight_checksum(matrices) == new.weight_checksum(matrices)


def shards(weights):
    """Parts of all tensors in a mixed order: (name, part, shard)."""
    found = []
    for name, w in weights.items():
        axis = len(name) % w.ndim
        count = next(n for n in (4, 3, 2, 1) if w.shape[axis] % n == 0)
        parts = np.split(w, count, axis)
        found += [(name, part, (axis, index, count)) for index, part in enumerate(parts)]
    random.Random(5).shuffle(found)
    return found


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("make", [np.copy, torch.from_numpy, lambda part: torch.from_numpy(part).to(torch.bfloat16)])
def test_shards(pair, n_ranks, make):
    llm, fresh, weights = pair(tensor_parallel_size=n_ranks, device="cpu")
    with llm.begin_update(version="joined") as update:
        for name, part, shard in shards(weights):
            given = make(part.copy())
            update.write(name, given, shard=shard)
            given[...] = 0  # the caller's again
    assert update.report.num_tensors == len(weights) and not update.report.repeated
    rounded = {name: make(w) for name, w in weights.items()}
    assert llm.compare_weights(rounded)
    fresh.update_weights(rounded)
    assert llm.weight_checksum() == fresh.weight_checksum() and outcome(llm) == outcome(fresh)


def test_shards_that_do_not_fit(pair):
    llm, _, weights = pair(device="cpu")
    name, norm = "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"
    top, bottom = np.split(weights[name], 2)
    update = llm.begin_update(partial=True)
    for shard in ((2, 0, 2), (0, 2, 2), (0, -1, 2), (0, 0, 0)):
        with pytest.raises(InvalidRequestError, match=r"^shard must be \(axis below 2, index below count, count\), got "):
            update.write(name, top, shard=shard)
    for shard in (0, (0, 1), "abc", (0, 0.5, 2)):
        with pytest.raises(TypeError):
            update.write(name, top, shard=shard)
    for key, part, shard in (("nothing", top, (0, 0, 2)), (name, top, (0, 0, 3)), (name, top[1:], (0, 0, 2)),
                             (name, top[0], (0, 0, 2)), (name, top.astype(int), (0, 0, 2))):  # fmt: skip
        with pytest.raises(WeightUpdateError, match=f"'{key}'"):
            update.write(key, part, shard=shard)
    update.write(name, top, shard=(0, 0, 2))
    for part, shard in ((np.split(weights[name], 2, 1)[1], (1, 1, 2)), (torch.from_numpy(bottom), (0, 1, 2)),
                        (bottom.astype(np.float16), (0, 1, 2)), (bottom[1:], (0, 1, 2))):  # fmt: skip
        with pytest.raises(WeightUpdateError, match="wanted a shard like the earlier ones"):
            update.write(name, part, shard=shard)
    update.write(norm, weights[norm])
    with pytest.raises(WeightUpdateError, match=rf"^weight '{name}': wanted 2 shards, have none of the indices 1$") as error:
        update.commit()
    assert error.value.missing == [name]
    update.write(name, bottom, shard=(0, 1, 2))
    assert update.commit().num_tensors == 2
    with llm.begin_update(partial=True, borrow=True) as update, pytest.raises(UnsupportedError, match="shard="):
        update.write(name, top, shard=(0, 0, 2))


def test_names(pair):
    old, new, weights = pair()
    report = old.update_weights(
        {f"wrapped.{name}": w for name, w in weights.items()} | {"value_head.weight": np.zeros(4), "lm_head.weight": weights},
        rename=lambda name: name.removeprefix("wrapped.") if not name.startswith("value") else None,
    )
    assert sorted(report.skipped) == ["lm_head.weight", "value_head.weight"]
    assert (report.missing, report.repeated) == ([], [])
    assert old.weight_checksum() == new.weight_checksum()


def test_repeated_and_partial(pair):
    old, new, weights = pair()
    first, sums = old.weight_checksum(), new.weight_checksum()
    name = "model.layers.1.self_attn.k_proj.weight"
    with old.begin_update(partial=True) as update:
        update.write(name, np.zeros_like(weights[name]))
        update.write(name, weights[name])
    assert update.report.repeated == [name]
    assert sorted(update.report.missing) == sorted(set(weights) - {name})
    assert old.weight_checksum() == first | {name: sums[name]}
    assert update.report.num_tensors == 1


def test_refusals_leave_the_update_open(pair, device):
    old, new, weights = pair("bfloat16")
    before, norm = outcome(old), "model.norm.weight"
    wrong = {
        "norm": (weights[norm], "weight 'norm' is not part of LlamaForCausalLM; nearest: 'model.norm.weight'", "unknown"),
        norm: (
            torch.zeros(4, 16, dtype=torch.int8),
            "weight 'model.norm.weight': wanted (64,) float32, have (4, 16) int8",
            "mismatched",
        ),
        "model.layers.0.mlp.up_proj.weight": (
            weights["model.layers.0.mlp.down_proj.weight"],
            "weight 'model.layers.0.mlp.up_proj.weight': wanted (96, 64) bfloat16, have (64, 96) float32",
            "mismatched",
        ),
        "model.embed_tokens.weight": (
            weights["model.embed_tokens.weight"].astype(np.float64),
            "weight 'model.embed_tokens.weight': wanted (304, 64) bfloat16, have (304, 64) float64",
            "mismatched",
        ),
    }
    with old.begin_update() as update:
        for name, (tensor, text, attribute) in wrong.items():
            with pytest.raises(WeightUpdateError) as error:
                update.write(name, tensor)
            assert str(error.value) == text
            assert {a: getattr(error.value, a) for a in ("unknown", "mismatched", "missing")} == {
                **dict.fromkeys(("unknown", "mismatched", "missing")), attribute: [name]
            }  # fmt: skip
        with pytest.raises(WeightUpdateError, match="cannot be read") as error:
            update.write(norm, torch.zeros(64, device="meta"))
        assert error.value.__cause__ is not None
        with pytest.raises(WeightUpdateError, match="cannot be read") as error:
            update.write(norm, object())
        assert error.value.mismatched == [norm]
        # All of a list is checked before any of it is written.
        with pytest.raises(WeightUpdateError):
            update.write_all([("model.layers.0.mlp.gate_proj.weight", weights[norm]), (norm, weights[norm])])
        with pytest.raises(WeightUpdateError):
            update.write_all([(norm, weights[norm]), ("norm", weights[norm])])
        update.abort()
    assert outcome(old) == before
    with old.begin_update() as update:
        update.write_all(weights)
    assert old.weight_checksum() == new.weight_checksum()


class Described:
    """A tensor of 64 floats in DLPack form: its device and the address of its memory."""

    class Fields(ctypes.Structure):
        _fields_ = [
            ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("n_dims", ctypes.c_int32), ("type", ctypes.c_uint8 * 2),
            ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_void_p),
            ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
        ]  # fmt: skip

    def __init__(self, kind, number, address):
        self.shape = (ctypes.c_int64 * 1)(64)
        self.fields = self.Fields(address, (kind, number), 1, (2, 32), 1, self.shape)

    def __dlpack_device__(self):
        return tuple(self.fields.device)

    def __dlpack__(self, stream=None):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self.fields), b"dltensor", None)


def test_tensors_that_are_elsewhere(pair):
    old, _, weights = pair()
    before, norm = outcome(old), "model.norm.weight"
    address = weights[norm].ctypes.data

    class Sharded(Described):
        def full_tensor(self):
            raise AssertionError

    refused = {
        "a tensor on cuda:9, while the engine is on": (Described(2, 9, address), UnsupportedError),
        "a tensor on a device of DLPack type 8": (Described(8, 0, address), UnsupportedError),
        "wanted a whole tensor, have a DTensor; use full_tensor()": (Sharded(1, 0, None), WeightUpdateError),
        "a wrapper around other tensors": (Described(1, 0, None), WeightUpdateError),
    }
    for text, (tensor, kind) in refused.items():
        with pytest.raises(kind, match=re.escape(f"weight '{norm}': cannot be read: {text}")):
            old.update_weights({norm: tensor}, partial=True)
        with pytest.raises(kind, match=re.escape(text)):
            old.compare_weights({norm: tensor})
    assert outcome(old) == before
    old.update_weights({norm: Described(1, 0, address)}, partial=True)
    assert old.compare_weights({norm: weights[norm]})


def test_missing(pair):
    old, _, weights = pair()
    before = outcome(old)
    name = "model.layers.1.mlp.down_proj.weight"
    rest = {key: w for key, w in weights.items() if key != name}
    text = f"1 of {len(weights)} weights were not written: '{name}'. Pass partial=True to keep the others."
    with pytest.raises(WeightUpdateError) as error:
        old.update_weights(rest)
    assert (str(error.value), error.value.missing) == (text, [name])
    assert outcome(old) == before  # a mapping is known to be incomplete before its first byte is written
    update = old.begin_update()
    update.write_all(iter(rest.items()))
    with pytest.raises(WeightUpdateError) as error:
        update.commit()
    assert str(error.value) == text
    update.write(name, weights[name])
    assert update.commit(version=3).version == 3
    with pytest.raises(WeightUpdateError, match="over"):
        update.write(name, weights[name])


def test_torn_weights(pair):
    old, new, weights = pair()
    wanted, norm = outcome(new), "model.norm.weight"
    with pytest.raises(KeyError), old.begin_update() as update:
        update.write(norm, weights[norm])
        with pytest.raises(EngineBusyError, match="being updated"):
            old.generate(PROMPTS, GREEDY)
        with pytest.raises(EngineBusyError, match="is open"):
            old.begin_update()
        raise KeyError
    for call in (lambda: old.generate(PROMPTS, GREEDY), lambda: old.score([[1, 2, 3]])):
        with pytest.raises(WeightsMissingError, match="weights are incomplete since epoch 0; commit a full update"):
            call()
    with pytest.raises(WeightUpdateError, match="torn"):
        old.update_weights({norm: weights[norm]}, partial=True)
    with pytest.raises(WeightsMissingError):
        old.generate(PROMPTS, GREEDY)
    old.update_weights(weights)
    assert outcome(old) == wanted


def test_check_finite(pair):
    old, _, weights = pair("bfloat16")
    before, name = old.weight_checksum(), "model.layers.0.mlp.up_proj.weight"
    for value in (np.nan, np.inf, 3.4e38):  # the last is infinite as bfloat16
        bad = weights[name].copy()
        bad[5, 7] = value
        with pytest.raises(WeightUpdateError, match=f"weight '{name}': 1 of its values are not finite") as error:
            old.update_weights({name: bad}, partial=True, check_finite=True)
        assert error.value.mismatched == [name]
    assert old.weight_checksum() == before
    old.generate(PROMPTS, GREEDY)


def test_versions_and_cache(pair):
    old, _, weights = pair()
    outcome(old)
    assert (old.weight_epoch, old.weight_version) == (0, 0)
    assert old.update_weights(weights, version="step-1").version == "step-1"
    output = old.generate(PROMPTS[0], GREEDY)[0]
    assert output.num_cached_tokens == 0  # the blocks of the old weights are not found
    assert [tuple(span) for span in output.outputs[0].weight_versions] == [(0, 12, "step-1", 1)]
    assert old.generate(PROMPTS[0], GREEDY)[0].num_cached_tokens == 32
    report = old.update_weights(weights)
    assert (report.epoch, report.version, old.weight_version) == (2, 2, 2)
    old.set_weight_version("label")
    assert (old.weight_epoch, old.weight_version) == (2, "label")


def test_arguments(pair, tmp_path):
    old, _, _ = pair()
    with pytest.raises(ValueError, match="on_running must be 'keep' or 'recompute', got 'stop'"):
        old.update_weights({}, on_running="stop")
    with pytest.raises(UnsupportedError, match="staging='double'"):
        old.begin_update(staging="double")
    with pytest.raises(ValueError, match="bucket_bytes must be at least 32MiB, got '1MiB'"):
        old.begin_update(bucket_bytes="1MiB")
    with pytest.raises(TypeError, match="version must be an int or a str"):
        old.begin_update(version=1.5)
    with pytest.raises(ModelNotFoundError, match="wanted a directory of safetensors files"):
        old.update_weights(tmp_path)
    old.begin_update().abort()  # none of these left an update open


def test_checksum_is_of_the_checkpoints_tensor(open_tiny, tiny_model):
    """The formula of docs/use/rl.md, computed here from the file."""
    llm = open_tiny(dtype="bfloat16")
    sums = llm.weight_checksum()
    stored = load_file(tiny_model / "model.safetensors")
    for name in ("model.layers.0.self_attn.v_proj.weight", "model.norm.weight"):
        tensor = torch.from_numpy(stored[name])
        if tensor.dim() == 2:
            bits = tensor.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(-1).astype(np.uint64)
        else:
            bits = stored[name].view(np.uint32).astype(np.uint64)
        with np.errstate(over="ignore"):
            z = np.arange(1, bits.size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            z += bits * np.uint64(0xD1B54A32D192ED03)
            z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
            assert sums[name] == int((z ^ z >> np.uint64(31)).sum(dtype=np.uint64))
    assert llm.weight_checksum("model.norm.weight") == {"model.norm.weight": sums["model.norm.weight"]}


def test_comparison(pair):
    old, new, weights = pair("bfloat16")
    assert new.compare_weights(weights)
    found = old.compare_weights(weights)
    assert not found
    assert sorted(found.different) == sorted(weights)
    assert old.compare_weights(old_weights(old))
    assert old.compare_weights(new.config.model).num_equal == 0
    name = "model.norm.weight"
    found = new.compare_weights({f"x.{name}": weights[name]}, rename=lambda n: n[2:])
    assert (found.num_equal, found.different, found.skipped) == (1, [], [])
    assert sorted(found.missing) == sorted(set(weights) - {name})


def test_many_updates_grow_nothing(pair, device):
    old, new, weights = pair("bfloat16")
    given = [tensors(weights, place) for place in places(device)]
    for source in given:
        old.update_weights(source)
    fixed = [key for key in old.memory() if key != "device_free"]
    before = [old.memory()[key] for key in fixed]
    for step in range(100):
        old.update_weights(given[step % len(given)], version=step)
    assert [old.memory()[key] for key in fixed] == before
    assert (old.weight_epoch, old.weight_version) == (100 + len(given), 99)
    assert outcome(old) == outcome(new)


def test_async_engine(open_async, device, long_model):
    stored = load_file(long_model / "model.safetensors")
    new = {name: (1.25 * w).astype(np.float32) for name, w in stored.items()}

    async def main():
        engine = open_async(fresh=True)
        before = await engine.weight_checksum()
        report = await engine.update_weights(new, version="new")
        assert (report.version, engine.weight_version) == ("new", "new")
        assert await engine.compare_weights(new)
        with pytest.raises(WeightUpdateError, match="not part of"):
            await engine.update_weights({"nothing": new["model.norm.weight"]})

        async def pieces():
            for item in stored.items():
                await asyncio.sleep(0)
                yield item

        async with engine.begin_update(version=2) as update:
            await update.write_all(pieces())
        assert update.report.version == engine.weight_version == 2
        assert await engine.weight_checksum() == before
        await engine.update_weights(long_model)
        assert await engine.weight_checksum() == before

    asyncio.run(main())


class Exported:
    """A tensor of an unknown library."""

    def __init__(self, tensor):
        self.tensor, self.streams = tensor, []

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        return self.tensor.__dlpack__() if stream is None else self.tensor.__dlpack__(stream=stream)


def test_any_library(pair, device):
    old, new, weights = pair("bfloat16")
    for place in {"cpu", device}:
        given = {name: Exported(t) for name, t in tensors(weights, place).items()}
        old.update_weights(given)
        assert old.weight_checksum() == new.weight_checksum()
        assert {stream for item in given.values() for stream in item.streams} == {None if place == "cpu" else 1}
        old.update_weights(old_weights(old))


def test_order_on_the_device(pair, device, cuda):
    """On any stream, a copy runs after the work that made the tensor and before work that changes it; the last write wins."""
    if device != cuda:
        return
    old, new, weights = pair("bfloat16")
    sums, final = new.weight_checksum(), tensors(weights, cuda)
    one, two = torch.cuda.Stream(cuda), torch.cuda.Stream(cuda)
    late = {name: torch.zeros_like(t) for name, t in final.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        torch.cuda._sleep(200_000_000)
        for name, t in late.items():
            t.copy_(final[name])
        old.update_weights(late)
        for t in late.values():
            t.zero_()
    assert old.weight_checksum() == sums
    zeros = {name: torch.zeros_like(t) for name, t in final.items()}
    torch.cuda.synchronize()
    with old.begin_update() as update:
        with torch.cuda.stream(one):
            torch.cuda._sleep(200_000_000)
            update.write_all(zeros)
        with torch.cuda.stream(two):
            update.write_all(iter(final.items()))
    assert old.weight_checksum() == sums
    with old.begin_update() as update:
        with torch.cuda.stream(one):
            torch.cuda._sleep(200_000_000)
            update.write_all(zeros)
        update.write_all(weights)
    assert old.weight_checksum() == sums
    with pytest.raises(WeightUpdateError, match="cannot be read"):
        old.update_weights({"model.norm.weight": torch.zeros(64, device="meta")}, partial=True)


def test_memory_runs_out(pair, device):
    """Each allocation fails once; afterwards a full update restores the engine."""
    old, new, weights = pair()
    failed = 0
    for number in range(200):
        _core.fail_allocation_after(number)
        try:
            old.update_weights(weights)
        except MemoryError:
            failed += 1
        else:
            break
        finally:
            _core.fail_allocation_after(-1)
    assert failed == number > 0
    assert old.weight_checksum() == new.weight_checksum()
    assert outcome(old) == outcome(new)


def test_who_may_update(pair):
    """An update is refused while another thread uses the engine, and a call of another thread while weights are written."""
    old, _, weights = pair()
    started, stop = threading.Event(), threading.Event()

    def endless():
        for item in weights.items():
            yield item
            started.set()
            assert stop.wait(60)

    thread = threading.Thread(target=old.update_weights, args=(endless(),))
    thread.start()
    assert started.wait(60)
    for call in (lambda: old.generate(PROMPTS, GREEDY), lambda: old.update_weights(weights)):
        with pytest.raises(EngineBusyError, match="update"):
            call()
    stop.set()
    thread.join(60)
    assert old.compare_weights(weights)
    with old._driver.driving(), pytest.raises(EngineBusyError, match="in use by another thread"):
        old.update_weights(weights)
    assert old.weight_epoch == 1


def test_open_updates_end_with_their_owner(pair):
    old, new, weights = pair()
    update = old.begin_update()
    update.write("model.norm.weight", weights["model.norm.weight"])
    del update
    gc.collect()
    with pytest.raises(WeightsMissingError):
        old.generate(PROMPTS, GREEDY)
    old.update_weights(weights)
    assert outcome(old) == outcome(new)
    update = old.begin_update()
    update.write("model.norm.weight", weights["model.norm.weight"])
    old.close()
    for call in (update.commit, update.abort, lambda: update.write("model.norm.weight", weights["model.norm.weight"])):
        with pytest.raises((EngineClosedError, WeightUpdateError)):
            call()


def test_an_abort_while_another_thread_has_the_engine(pair):
    """Partly written weights end as incomplete even if another thread had the engine."""
    old, new, weights = pair()
    norm = "model.norm.weight"
    for is_dropped in (False, True):
        update = old.begin_update()
        update.write(norm, weights[norm])
        with old._driver.driving(steps=False):
            if is_dropped:
                del update
                gc.collect()
            else:
                with pytest.raises(EngineBusyError, match="in use"):
                    update.abort()
            with pytest.raises(EngineBusyError):
                old.begin_update()
        if not is_dropped:
            update.abort()
            with pytest.raises(WeightsMissingError):
                old.generate(PROMPTS, GREEDY)
        with pytest.raises(WeightUpdateError, match="torn"):
            old.update_weights({norm: weights[norm]}, partial=True)
        old.update_weights(weights)
        assert outcome(old) == outcome(new)


def test_the_loop_goes_on(open_async, long_model):
    """While a slow source is read and copied, the event loop runs; requests wait and then continue."""
    stored = load_file(long_model / "model.safetensors")
    entered, left = threading.Event(), threading.Event()

    def slow():
        for item in stored.items():
            yield item
            entered.set()
            assert left.wait(60)

    async def main():
        engine = open_async(fresh=True)
        stream = engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
        reading = asyncio.create_task(_last(stream))
        updating = asyncio.create_task(engine.update_weights(slow(), version="new"))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        late = engine.generate([5], SamplingParams(max_tokens=1))
        made = engine.stats().generation_tokens
        await asyncio.sleep(0.02)
        assert engine.stats().generation_tokens == made
        updating.cancel()  # the update continues
        with pytest.raises(asyncio.CancelledError):
            await updating
        left.set()
        output = await reading
        while engine.weight_epoch == 0:
            await asyncio.sleep(0.01)
        assert (await late).weight_version == "new"
        assert len(output.outputs[0].token_ids) == 300
        assert engine.weight_version == "new"
        spans = output.outputs[0].weight_versions
        assert (spans[0].start, spans[-1].end) == (0, 300)

    asyncio.run(main())


async def _last(stream):
    async for output in stream:
        last = output
    return last


def test_close_while_weights_are_written(open_async, long_model):
    stored = load_file(long_model / "model.safetensors")

    async def main():
        engine = open_async(fresh=True)
        entered, left = threading.Event(), threading.Event()

        def source():
            items = list(stored.items())
            yield items[0]
            entered.set()
            left.wait(60)
            yield from items[1:]

        updating = asyncio.create_task(engine.update_weights(source()))
        await asyncio.to_thread(entered.wait, 60)
        engine.close()
        left.set()
        with pytest.raises((EngineClosedError, WeightUpdateError)):
            await updating

    asyncio.run(main())
