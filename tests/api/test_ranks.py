"""Ranks: for any number of them an engine gives the same bits, and weights, sleep, taps and statistics cover all of them."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from contextlib import ExitStack
from itertools import product

import httpx
import numpy as np
import pytest
from async_help import read
from safetensors.numpy import load_file, save_file

from llmpy import (
    LLM,
    AsyncEngine,
    ConfigError,
    DeviceError,
    DeviceMemoryError,
    EngineAsleepError,
    EngineClosedError,
    EngineDeadError,
    SamplingParams,
    WeightsMissingError,
    WeightUpdateError,
    devices,
    hardware,
)
from llmpy.models.shard import shard
from llmpy.rl import WeightSender, ipc_bucket, weight_metadata

COUNTS = (1, 2, 3, 4)
FEW = (2, 3)
"""Numbers of ranks where each test opens engines of its own."""
SHARED = [3, 4, 5, 6, 7] * 14
PROMPTS = [SHARED, [9, 8, 7], [100, 101] * 20, "some text", [*SHARED, 11]]
PARAMS = [
    {"seed": 1},
    {"temperature": 0.0},
    {"n": 3, "seed": 2},
    {"top_p": 0.7, "top_k": 20, "seed": 3, "prompt_logprobs": 1},
    {"min_p": 0.02, "presence_penalty": 0.5, "seed": 4},
]


def open_ranks(path, n_ranks, kind=LLM, **options):
    return kind(path, **{"device": "cpu", "tensor_parallel_size": n_ranks, "kv_cache_memory_bytes": "8MiB", **options})


@pytest.fixture(scope="module", autouse=True)
def cut_all():
    """Cuts every matrix that can be cut; else all matrices of so small a model would be whole on each rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmpy.models.shard.default_replicate_bytes", lambda n_ranks: 0)
        yield


@pytest.fixture(scope="module")
def other(tmp_path_factory, write_model):
    """Directory of a model of the same shape with other weights, and these weights."""
    path = write_model(tmp_path_factory.mktemp("other_ranks"))
    weights = {name: (1.25 * w + 0.01).astype(np.float32) for name, w in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors")
    return path, weights


@pytest.fixture(scope="module")
def engines(tiny_model):
    """Engines with one to four ranks."""
    with ExitStack() as stack:
        yield [stack.enter_context(open_ranks(tiny_model, n, kv_event_capacity=512)) for n in COUNTS]


@pytest.fixture
def made():
    """Opens engines for one test."""
    with ExitStack() as stack:
        yield lambda path, n_ranks, **options: stack.enter_context(open_ranks(path, n_ranks, **options))


def bits(output):
    """Ids, logprobs and alternatives of an output, as bytes."""
    prompt = None if output.prompt_token_logprobs is None else output.prompt_token_logprobs.tobytes()
    return prompt, [
        (one.token_ids, one.finish_reason, one.text, one.sampled.raw.tobytes(), one.logprobs.values.tobytes())
        for one in output.outputs
    ]


def outcome(llm):
    """The bits of a few requests of all kinds, without hits of the prefix cache."""
    llm.reset_prefix_cache()
    params = [SamplingParams(**{"max_tokens": 10, "logprobs": 2, "ignore_eos": True, **how}) for how in PARAMS]
    return [*map(bits, llm.generate(PROMPTS, params))]


# ---- results ---------------------------------------------------------------------------------------------------------


def test_generate(engines):
    found = [(outcome(llm), [*map(bits, llm.generate(PROMPTS, max_tokens=6, logprobs=1, seed=9))]) for llm in engines]
    assert all(one == found[0] for one in found)
    for llm in engines:
        llm.check()


def test_streams_scores_and_chat(engines):
    found = []
    for llm in engines:
        text = "".join(llm.stream("tell", max_tokens=9, seed=3))
        scores = [score.token_logprobs.tobytes() for score in llm.score(PROMPTS)]
        chat = llm.chat([{"role": "user", "content": "hello"}], max_tokens=5, seed=4, logprobs=0)
        found.append((text, scores, bits(chat[0])))
    assert all(one == found[0] for one in found)


def test_pooling(engines):
    found = []
    for llm in engines:
        each = llm.encode(PROMPTS, pooling_task="token_embed")
        vectors = [llm.embed(PROMPTS, pooling=how).numpy().tobytes() for how in ("last", "mean")]
        found.append((vectors, [output.outputs.data.tobytes() for output in each]))
    assert all(one == found[0] for one in found)


def test_grammars(engines):
    pytest.importorskip("llguidance")
    kinds = [{"choice": ["yes", "no", "maybe"]}, {"regex": "[a-f]{4,9}"}, {"json": {"type": "integer"}}]
    params = [
        SamplingParams(max_tokens=12, seed=number, logprobs=1, structured_outputs=how) for number, how in enumerate(kinds)
    ]
    found = [[*map(bits, llm.generate(["pick"] * 3, params))] for llm in engines]
    assert all(one == found[0] for one in found) and found[0][0][1][0][2] in kinds[0]["choice"]


def test_async_engine(tiny_model, other):
    async def main(engine):
        params = [SamplingParams(max_tokens=8, logprobs=2, **how) for how in PARAMS if "n" not in how]
        streams = [engine.generate(prompt, how) for prompt, how in zip(PROMPTS, params, strict=False)]
        streamed = [[output.outputs[0].token_ids for output in each] for each in await asyncio.gather(*map(read, streams))]
        before = bits(await engine.generate(PROMPTS[0], params[0])), (await engine.score(SHARED)).token_logprobs.tobytes()
        running = engine.generate(PROMPTS[1], SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
        await engine.pause("keep")
        await engine.update_weights(other[1], version="new")
        await engine.resume()
        assert len((await running).outputs[0].token_ids) == 200  # it may have ended before the pause
        await engine.sleep()
        await engine.wake_up()
        after = bits(await engine.generate(PROMPTS[0], params[0])), await engine.weight_checksum()
        return streamed[0][-1], before, after

    found = []
    for count in (1, *FEW):
        engine = open_ranks(tiny_model, count, AsyncEngine)
        found.append(asyncio.run(main(engine)))
        engine.close()
        engine.close()
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes(made, tiny_model, dtype):
    found = [(outcome(llm), llm.weight_checksum()) for llm in (made(tiny_model, n, dtype=dtype) for n in (1, *FEW))]
    assert found[0] == found[1] == found[2]


def test_taps(engines):
    names = engines[0].tap_names()
    assert "logits" in names and len(names) > 10
    arrays = [llm.tap([[5, 6, 7, 8], SHARED], names) for llm in engines]
    for found in arrays[1:]:
        for one, many in zip(arrays[0], found, strict=True):
            for name in names:
                assert one[name].shape == many[name].shape, name
                assert one[name].tobytes() == many[name].tobytes(), name
    assert all(llm.tap_names() == names for llm in engines)


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_checksums_and_comparison(engines, tiny_model, other):
    sums = [llm.weight_checksum() for llm in engines]
    assert all(one == sums[0] for one in sums)
    name = "model.layers.1.mlp.gate_proj.weight"
    for llm in engines:
        assert llm.weight_checksum(name) == {name: sums[0][name]}
        assert llm.compare_weights(tiny_model) and llm.compare_weights(load_file(tiny_model / "model.safetensors"))
        found = llm.compare_weights(other[1])
        assert not found and sorted(found.different) == sorted(other[1])


def test_every_row_lies_on_a_rank(engines):
    alone = {info["name"]: info for info in engines[0].weight_info()}
    assert all(info["shard"] is None for info in alone.values())
    for llm, count in zip(engines[1:], COUNTS[1:], strict=True):
        infos = {info["name"]: info for info in llm.weight_info()}
        assert infos.keys() == alone.keys()
        n_cut = 0
        for name, info in infos.items():
            assert {**info, "shard": None} == alone[name]
            rows = [{row for part in ranges for row in range(*part)} for ranges in info["shard"]]
            assert len(rows) == count and set.union(*rows) == set(range(info["shape"][0])), name
            n_cut += rows[0] != rows[1]
        assert n_cut > 10


def test_full_updates(made, tiny_model, other):
    torch = pytest.importorskip("torch")
    path, weights = other
    fresh = made(path, 1)
    wanted, sums = outcome(fresh), fresh.weight_checksum()
    for count in FEW:
        llm = made(tiny_model, count)
        before, first_sums = outcome(llm), llm.weight_checksum()
        assert before != wanted
        strided = {name: torch.from_numpy(np.repeat(w, 2, axis=-1))[..., ::2] for name, w in weights.items()}
        for number, source in enumerate((weights, strided, iter(reversed(weights.items())), path, str(path))):
            report = llm.update_weights(source, version=f"new {number}")
            assert report.num_tensors == len(weights) and report.missing == report.repeated == []
            assert llm.weight_version == f"new {number}" and llm.weight_checksum() == sums and llm.compare_weights(weights)
            assert outcome(llm) == wanted
            llm.update_weights(tiny_model)
            assert llm.weight_checksum() == first_sums
        assert outcome(llm) == before


def strided(tensor):
    """The same values with strides of 3 along rows and of more along columns."""
    if tensor.dim() == 1:
        return tensor.repeat_interleave(3)[::3]
    return tensor.t().repeat_interleave(3, 1)[:, ::3].t()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_from_the_memory_of_the_first_device(made, tiny_model, other, dtype):
    """Ranks on other devices copy it; the trainer's stream goes on only behind them."""
    torch = pytest.importorskip("torch")
    if sum(device["device"].startswith("cuda") and device["available"] for device in devices()) < 2:
        pytest.skip("needs two CUDA devices")
    options = {"device": "cuda:0", "device_ids": (0, 1), "dtype": dtype, "kv_cache_memory_bytes": "64MiB"}
    fresh, path, weights = made(other[0], 2, **options), tiny_model, other[1]
    for of_type, change in product((torch.float32, torch.bfloat16), (torch.clone, strided)):
        llm = made(path, 2, **options)
        given = {name: torch.from_numpy(w).to("cuda:0", of_type) for name, w in weights.items()}
        assert not llm.compare_weights(given)
        moved = {name: change(tensor) for name, tensor in given.items()}
        llm.update_weights(moved)
        for tensor in moved.values():
            tensor.zero_()
        assert llm.compare_weights(given)
        if of_type is torch.float32:
            assert llm.weight_checksum() == fresh.weight_checksum()
            assert outcome(llm) == outcome(fresh)
        llm.close()


def test_partial_updates(made, tiny_model, other):
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight",
             "model.embed_tokens.weight", "model.layers.1.self_attn.v_proj.weight"]  # fmt: skip
    one = made(tiny_model, 1)
    first = one.weight_checksum()
    report = one.update_weights({name: other[1][name] for name in names}, partial=True)
    wanted, sums = outcome(one), one.weight_checksum()
    assert {name for name in sums if sums[name] != first[name]} == set(names)
    for count in FEW:
        llm = made(tiny_model, count)
        with llm.begin_update(partial=True) as update:
            for name in names:
                update.write(name, other[1][name])
        assert (update.report.num_tensors, update.report.missing) == (report.num_tensors, report.missing)
        assert llm.weight_checksum() == sums and outcome(llm) == wanted


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_trainer_sees_one_member(made, tiny_model, other, replicas):
    """A group over TCP, and buckets of shared memory."""
    fresh = made(other[0], 1)
    for count in FEW:
        llm = made(tiny_model, count, data_parallel_size=replicas)
        old, size = llm.weight_checksum(), llm.get_world_size() + 1
        with WeightSender("127.0.0.1", 0, size, device="cpu", buffer_bytes=4096) as sender:
            sent = threading.Thread(target=sender.send, args=(other[1],))
            sent.start()
            group = llm.init_weight_group("127.0.0.1", sender.master_port, 1, size, buffer_bytes=4096)
            llm.update_weights(group)
            sent.join()
            llm.destroy_weight_group()
        assert llm.weight_checksum() == fresh.weight_checksum() != old and outcome(llm) == outcome(fresh)
        first, second = dict(list(other[1].items())[::2]), dict(list(other[1].items())[1::2])
        llm.update_weights(tiny_model)
        llm.update_weights([ipc_bucket(first), ipc_bucket(second)])
        assert llm.weight_checksum() == fresh.weight_checksum() and outcome(llm) == outcome(fresh)


def test_refused_updates_change_nothing(engines, other):
    weights = other[1]
    name = "model.layers.0.self_attn.k_proj.weight"
    for llm in engines:
        before, first = llm.weight_checksum(), outcome(llm)
        for given in ({"nothing": weights[name]}, {name: weights[name][:-1]}, {name: weights[name][:, :-1]},
                      {name: weights[name].reshape(-1)}):  # fmt: skip
            with pytest.raises(WeightUpdateError):
                llm.update_weights(given, partial=True)
        with pytest.raises(WeightUpdateError, match="19 of 20 weights were not written"):
            llm.update_weights({name: weights[name]})
        bad = weights[name].copy()
        bad[-1, -1] = np.nan
        with pytest.raises(WeightUpdateError, match="not finite"):
            llm.update_weights({name: bad}, partial=True, check_finite=True)
        assert llm.weight_checksum() == before and outcome(llm) == first and llm.weight_epoch == 0


def test_torn_weights(made, tiny_model, other):
    llm = made(tiny_model, 2)
    with pytest.raises(KeyError), llm.begin_update() as update:
        update.write("model.norm.weight", other[1]["model.norm.weight"])
        raise KeyError
    with pytest.raises(WeightsMissingError):
        llm.generate("x", max_tokens=1)
    llm.update_weights(tiny_model)
    assert outcome(llm) == outcome(made(tiny_model, 1))


# ---- mixtures of experts ----------------------------------------------------------------------------------------------

MOE = {
    "vocab_size": 304, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "num_experts_per_tok": 3, "max_position_embeddings": 256,
    "torch_dtype": "float32", "eos_token_id": 2,
}  # fmt: skip
MIXTURES = {
    "an expert has tensors": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 7,
                              "moe_intermediate_size": 32},
    "stacked": {"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "num_local_experts": 7,
                "logits_scaling": 1.5},
    "stacked in turn": {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 7,
                        "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip

OF_MIXTURES = {"skip_tokenizer_init": True, "max_model_len": 256}


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request, tmp_path_factory):
    """Directory of a mixture, and other weights for it."""
    path = tmp_path_factory.mktemp("mixture")
    (path / "config.json").write_text(json.dumps({**MOE, **MIXTURES[request.param]}))
    with open_ranks(path, 1, load_format="dummy", **OF_MIXTURES) as llm:
        shapes = {info["name"]: info["shape"] for info in llm.weight_info()}
    rng = np.random.default_rng(5)
    both = [
        {name: (0.2 * rng.standard_normal(shape) + ("norm" in name)).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(2)
    ]
    save_file(both[0], path / "model.safetensors")
    return path, both[1]


def mixture_outcome(llm):
    """Bits of requests and taps, and the sums of the weights."""
    params = [SamplingParams(max_tokens=6, seed=1, temperature=0.8, logprobs=3, prompt_logprobs=1, ignore_eos=True)] * 3
    names = llm.tap_names()
    taps = llm.tap([SHARED[:19]], names)[0]
    llm.reset_prefix_cache()
    prompts = [[3, 9, 4], SHARED, [7]]
    return [*map(bits, llm.generate(prompts, params))], {name: taps[name].tobytes() for name in names}, llm.weight_checksum()


def test_mixtures(made, mixture):
    """Results, taps, updates and sleep of a mixture are those of one rank."""
    path, weights = mixture
    one = made(path, 1, **OF_MIXTURES)
    first = mixture_outcome(one)
    part = {name: w for name, w in weights.items() if "experts.5." in name or "output_linear" in name or "down_proj" in name}
    assert 0 < len(part) < len(weights)
    one.update_weights(part, partial=True)
    second = mixture_outcome(one)
    one.update_weights(weights)
    third = mixture_outcome(one)
    assert first[2] != second[2] != third[2] and first[0] != second[0] != third[0]
    for count, experts in ((2, "rank"), (3, "rank"), (4, "rank"), (2, "width")):
        llm = made(path, count, experts=experts, **OF_MIXTURES)
        assert mixture_outcome(llm) == first and llm.compare_weights(path)
        llm.update_weights(part, partial=True)
        assert mixture_outcome(llm) == second and not llm.compare_weights(path)
        llm.update_weights(weights)
        llm.sleep()
        llm.wake_up()
        assert mixture_outcome(llm) == third and llm.compare_weights(weights)


def test_every_expert_lies_on_one_rank(made, mixture):
    llm = made(mixture[0], 3, experts="rank", **OF_MIXTURES)
    found = {info["name"]: info for info in llm.weight_info() if "expert" in info["name"] or "_linear" in info["name"]}
    assert len(found) >= 4
    for name, info in found.items():
        rows = [[row for part in ranges for row in range(*part)] for ranges in info["shard"]]
        n_rows = sum(map(len, rows))
        if number := re.search(r"experts\.(\d+)", name):
            rank = next(rank for rank, end in enumerate((3, 5, 7)) if int(number[1]) < end)
            assert n_rows == info["shape"][0] and [len(own) for own in rows] == [n_rows * (rank == i) for i in range(3)]
        else:  # rows of all experts, one behind the other
            each = n_rows // 7
            assert n_rows == 7 * each and info["shape"][0] == 7
            assert [sorted(own) for own in rows] == [[*range(a * each, b * each)] for a, b in ((0, 3), (3, 5), (5, 7))], name
    weights = [rank["weights_bytes"] for rank in llm.ranks()]
    assert max(weights) < 0.5 * sum(weights)


# ---- sleep, memory, statistics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tags", [None, ["weights"], ["kv_cache"]])
def test_sleep_changes_no_bit(engines, tags):
    for llm in engines[1:]:
        before, memory, sums = outcome(llm), llm.memory(), llm.weight_checksum()
        llm.sleep(tags=tags)
        with pytest.raises(EngineAsleepError):
            llm.generate("x", max_tokens=1)
        assert [rank["kv_bytes"] == 0 for rank in llm.ranks()] == [tags != ["weights"]] * len(llm.ranks())
        llm.wake_up(tags)
        assert not llm.is_sleeping()
        assert {**llm.memory(), "device_free": 0} == {**memory, "device_free": 0}
        assert llm.weight_checksum() == sums and outcome(llm) == before


def test_sleep_without_weights(made, tiny_model, other):
    wanted = outcome(made(other[0], 1))
    for count in FEW:
        llm = made(tiny_model, count)
        llm.sleep(level=2)
        assert all(rank["kv_bytes"] == 0 for rank in llm.ranks())
        llm.wake_up(["weights"])
        assert llm.is_sleeping() and all(rank["kv_bytes"] == 0 and rank["weights_bytes"] for rank in llm.ranks())
        llm.update_weights(other[1])
        llm.wake_up(["kv_cache"])
        assert not llm.is_sleeping() and all(rank["kv_bytes"] for rank in llm.ranks())
        assert outcome(llm) == wanted


def test_memory_of_ranks(engines):
    for llm, count in zip(engines, COUNTS, strict=True):
        ranks = llm.ranks()
        assert [rank["rank"] for rank in ranks] == list(range(count)) and llm.get_world_size() == 1
        assert llm.stats().comm == ("none" if count == 1 else "threads")
        assert {rank["device"] for rank in ranks} == {"cpu"}
        assert llm.memory()["weights"] == sum(rank["weights_bytes"] for rank in ranks)
        assert llm.memory()["kv"] == sum(rank["kv_bytes"] for rank in ranks)
    alone, two = (llm.ranks() for llm in engines[:2])
    assert all(0.4 < rank["weights_bytes"] / alone[0]["weights_bytes"] < 0.7 for rank in two)


def test_cache_and_statistics(engines):
    found = []
    for llm in engines:
        llm.reset_prefix_cache()
        behind, events = llm.kv_events()
        while events:  # one call returns at most 64
            behind, events = llm.kv_events(behind)
        start = llm.stats()
        hits = [llm.generate(SHARED, max_tokens=4, ignore_eos=True)[0].num_cached_tokens for _ in range(2)]
        stats, events = llm.stats(), llm.kv_events(behind)[1]
        assert stats.prefix_cache_hits > start.prefix_cache_hits and stats.states == ("serving",)
        steps = stats.num_steps - start.num_steps, stats.generation_tokens - start.generation_tokens
        found.append((hits, [(one.token_ids, one.group, one.parent is None) for one in events if one.kind == 0], steps))
        assert stats.kv_blocks_free == stats.kv_blocks_total
    assert all(one == found[0] for one in found) and found[0][0] == [0, 64] and found[0][1]


# ---- ends and refusals -----------------------------------------------------------------------------------------------


def test_close_and_fork(tiny_model):
    llm = open_ranks(tiny_model, 3)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        message = "nothing"
        try:
            llm.generate("a")
        except EngineClosedError as error:
            message = str(error)
        llm.close()
        os.write(write_end, message.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 1000).decode().startswith(f"engine belongs to process {os.getpid()};")
    assert llm.generate("a", max_tokens=2)[0].finished
    n_threads = len(os.listdir("/proc/self/task"))
    llm.close()
    llm.close()
    assert len(os.listdir("/proc/self/task")) <= n_threads - 2
    with pytest.raises(EngineClosedError):
        llm.generate("a")


def test_a_rank_that_is_late(tiny_model):
    with open_ranks(tiny_model, 2, step_timeout_s=1e-7) as llm:
        with pytest.raises(DeviceError, match=r"^rank \d \(cpu\) did not reach [^:]* within 1e-07 s \(step_timeout_s\)"):
            llm.generate("a", max_tokens=200, ignore_eos=True)
        with pytest.raises(EngineDeadError, match="step_timeout_s"):
            llm.generate("a", max_tokens=1)
        assert llm.stats().states == ("dead",)


def test_ranks_that_compute_other_values_are_named(engines, tiny_model, monkeypatch):
    monkeypatch.setenv("LLMPY_SYNC", "2")
    with open_ranks(tiny_model, 3) as llm:
        assert outcome(llm) == outcome(engines[0])

    def spoiled(spec, *args, **options):
        """One norm of rank 2 has another eps."""
        programs = shard(spec, *args, **options)
        norms = [number for number, (name, _) in enumerate(programs[2]["ops"]) if name == "rms_norm"]
        name, op = programs[2]["ops"][norms[1]]
        programs[2]["ops"][norms[1]] = (name, {**op, "attributes": {**op["attributes"], "eps": 1e-3}})
        return programs

    monkeypatch.setattr("llmpy.models.shard.shard", spoiled)
    match = r"^rank 2 \(cpu\): operation \d+ \(rms_norm.*\) has given other values than on rank 0"
    with open_ranks(tiny_model, 3) as llm:
        with pytest.raises(DeviceError, match=match):
            llm.generate("a", max_tokens=4)
        with pytest.raises(EngineDeadError):
            llm.generate("a", max_tokens=4)
    monkeypatch.setenv("LLMPY_SYNC", "0")
    with open_ranks(tiny_model, 3) as llm:
        assert outcome(llm) != outcome(engines[0])


def test_options_that_are_refused(tiny_model):
    match = "^tensor_parallel_size=5: 4 heads over 2 kv heads cannot be shared by 5 ranks; 1, 2, 3 or 4 can$"
    with pytest.raises(ConfigError, match=match):
        open_ranks(tiny_model, 5)
    with pytest.raises(ConfigError, match=r"device_ids must have tensor_parallel_size=2 numbers, got \[0\]"):
        open_ranks(tiny_model, 2, device_ids=[0])
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="step_timeout_s"):
            open_ranks(tiny_model, 2, step_timeout_s=seconds)
    for count in (0, 65, "2", 1.5):
        with pytest.raises((ConfigError, TypeError), match="tensor_parallel_size"):
            open_ranks(tiny_model, count)
    open_ranks(tiny_model, 2, device_ids=[0, 0]).close()
    free = hardware.memory_bytes("cpu")[1]
    with pytest.raises(DeviceMemoryError, match="kv_cache_memory_bytes: wanted"):
        open_ranks(tiny_model, 4, kv_cache_memory_bytes=free // 2)


def test_how_ranks_share_experts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MOE, **MIXTURES["an expert has tensors"]}))
    options = {"load_format": "dummy", "skip_tokenizer_init": True}
    with pytest.raises(ConfigError, match="tensor_parallel_size=4: 3 experts cannot be shared by 4 ranks; 1, 2 or 3 can"):
        open_ranks(tmp_path, 4, experts="rank", hf_overrides={"num_experts": 3}, **options)
    few = "tensor_parallel_size=3: 32 inner columns of an expert in blocks of 16 cannot be shared by 3 ranks; 1 or 2 can"
    with pytest.raises(ConfigError, match=few):
        open_ranks(tmp_path, 3, experts="width", **options)
    rows = {}
    for experts in ("auto", "width", "rank"):
        with open_ranks(tmp_path, 2, experts=experts, **options) as llm:
            rows[experts] = llm.weight_info("*.1.mlp.experts.0.gate_proj.weight")[0]["shard"]
    assert rows == {"auto": [[(0, 16, 1)], [(16, 32, 1)]], "width": rows["auto"], "rank": [[(0, 32, 1)], []]}
    with open_ranks(tmp_path, 2, enable_expert_parallel=True, hf_overrides={"num_experts": 9}, **options) as llm:
        assert llm.config.experts == "rank"
        assert llm.weight_info("*.1.mlp.experts.0.gate_proj.weight")[0]["shard"] == rows["rank"]
    with pytest.raises(ConfigError, match="experts must be 'rank' with enable_expert_parallel=True, got 'width'"):
        open_ranks(tmp_path, 2, enable_expert_parallel=True, experts="width", **options)
    with pytest.raises(ConfigError, match="experts must be one of auto, rank, width"):
        open_ranks(tmp_path, 2, experts="half", **options)


# ---- the command line ------------------------------------------------------------------------------------------------


def train(server, weights):
    """Updates a server's weights by the rule of vLLM's trainers: the group has one member more than the server says."""

    def post(path, **body):
        answer = server.post(path, json=body)
        assert answer.status_code == 200, answer.text

    size = server.get("/get_world_size").json()["world_size"] + 1
    names, dtypes, shapes = weight_metadata(weights)
    with WeightSender("127.0.0.1", 0, size, device="cpu") as sender:
        sent = threading.Thread(target=sender.send, args=(weights,))
        sent.start()
        address = {"master_address": "127.0.0.1", "master_port": sender.master_port, "rank_offset": 1, "world_size": size}
        post("/init_weight_transfer_engine", init_info={**address, "packed": True})
        post("/update_weights", update_info={"names": names, "dtype_names": dtypes, "shapes": shapes, "packed": True})
        sent.join()


def test_serve(engines, tiny_model, other, made):
    words = ["serve", "--device", "cpu", "--port", "0", "--kv-cache-memory-bytes", "4MiB", "--tensor-parallel-size", "2",
             "--control"]  # fmt: skip
    command = [sys.executable, "-m", "llmpy", *words, "--", str(tiny_model)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = [process.stderr.readline()]
            while lines[-1] and not lines[-1].startswith("http"):
                lines.append(process.stderr.readline())
            assert lines[-1], lines
            body = {"model": str(tiny_model), "prompt": "tell", "max_tokens": 9, "seed": 3, "temperature": 0.9}
            with httpx.Client(base_url=lines[-1].strip().removesuffix("/v1"), timeout=60) as server:
                answer = server.post("/v1/completions", json=body).json()
                train(server, other[1])
                trained = server.post("/v1/completions", json=body).json()
        finally:
            process.terminate()
            process.communicate(timeout=60)
    how = {"max_tokens": 9, "seed": 3, "temperature": 0.9}
    wanted = [llm.generate("tell", **how)[0].outputs[0].text for llm in (engines[0], made(other[0], 1))]
    assert [one["choices"][0]["text"] for one in (answer, trained)] == wanted and wanted[0] != wanted[1]
