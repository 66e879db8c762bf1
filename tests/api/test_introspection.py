"""What an engine shows of itself: taps beside requests, metrics under vLLM's names, calls by name."""

import asyncio

import numpy as np
import pytest
from async_help import run

from llmpy import EngineBusyError, EngineClosedError, InvalidRequestError, UnsupportedError, WeightsMissingError
from llmpy.metrics import Counter, Gauge, Histogram, Vector

PROMPTS = ["hello there", "x"]


def test_taps_of_an_async_engine_are_those_of_an_llm(open_async, open_long):
    llm, engine = open_long(), open_async()
    names = ["model.embed_tokens", "model.layers.0", "logits"]
    wanted = llm.tap(PROMPTS, names)
    assert engine.tap_names() == llm.tap_names()

    async def main():
        params = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}
        alone = (await engine.generate("beside", **params)).token_ids
        stream = engine.generate("beside", **params)
        found = await asyncio.gather(*(engine.tap(PROMPTS, names) for _ in range(3)))
        assert (await stream).token_ids == alone
        for taps in found:
            for mine, theirs in zip(taps, wanted, strict=True):
                assert all(np.array_equal(mine[name], theirs[name]) for name in names)
        with pytest.raises(InvalidRequestError, match=r"nearest: model\.layers"):
            await engine.tap("x", "model.layers.O")

    run(main())
    engine.check()


def test_taps_want_whole_weights(open_async):
    engine = open_async(fresh=True)

    async def main():
        update = engine.begin_update()
        await update.write("model.norm.weight", np.ones(64, np.float32))
        with pytest.raises(EngineBusyError, match=r"^tap: the weights are being updated; commit or abort"):
            await engine.tap("x", "logits")
        await update.abort()
        with pytest.raises(WeightsMissingError):
            await engine.tap("x", "logits")
        await engine.shutdown()
        with pytest.raises(EngineClosedError):
            await engine.tap("x", "logits")

    run(main())


def test_metrics_are_those_of_the_server(open_tiny):
    llm = open_tiny(speculative_config={"method": "ngram", "k": 2})
    llm.generate(["a a a a a a a a"] * 2, temperature=0.0, max_tokens=30, ignore_eos=True)
    metrics, stats, histogram = llm.get_metrics(), llm.stats(), llm.histograms()["output_tokens"]
    assert all(one.name.startswith("vllm:") and one.labels["model_name"] == llm.name for one in metrics)
    by_name = {(one.name.removeprefix("vllm:"), *one.labels.values()): one for one in metrics}
    assert len(by_name) == len(metrics)

    def only(name, *labels):
        return by_name[(name, llm.name, "0", *labels)]

    assert only("generation_tokens") == Counter("vllm:generation_tokens", {"model_name": llm.name, "engine": "0"}, 60)
    assert only("request_success", "length").value == 2 and only("request_success", "stop").value == 0
    assert only("num_requests_running") == Gauge("vllm:num_requests_running", {"model_name": llm.name, "engine": "0"}, 0.0)
    place = only("spec_decode_num_accepted_tokens_per_pos")
    assert type(place) is Vector and place.values == list(stats.accepted_drafts) and sum(place.values) > 0
    assert sum(place.values) == only("spec_decode_num_accepted_tokens").value
    tokens = only("request_generation_tokens")
    assert type(tokens) is Histogram and tokens.count == 2 and tokens.sum == 60 == histogram.sum
    assert list(tokens.buckets)[-1] == "+Inf" and tokens.buckets["+Inf"] == 2
    assert list(tokens.buckets.values()) == np.cumsum(histogram.counts).tolist()


def test_calls_by_name(open_async, open_long):
    llm, engine = open_long(), open_async()
    assert llm.collective_rpc("get_world_size") == [1] and llm.collective_rpc("report_device_id") == [llm.config.device]
    sums = llm.collective_rpc("weight_checksum", args=(["model.norm.weight"],))
    assert sums == [llm.weight_checksum(["model.norm.weight"])] and sums[0]
    assert llm.collective_rpc("reset_prefix_cache", kwargs={"reset_running_requests": True}) == [True]
    with pytest.raises(InvalidRequestError, match=r"^collective_rpc: wanted one of get_world_size, .*, have 'close'"):
        llm.collective_rpc("close")
    for call in (lambda: llm.collective_rpc(lambda worker: worker), lambda: run(engine.collective_rpc(print))):
        with pytest.raises(UnsupportedError, match="there are no worker processes"):
            call()
    for one in (llm, engine):
        with pytest.raises(UnsupportedError, match="there is no module tree"):
            one.apply_model(lambda model: model)

    async def main():
        assert await engine.collective_rpc("sleep", timeout=60, kwargs={"level": 1}) == [None] and engine.is_sleeping()
        assert await engine.collective_rpc("wake_up") == [None] and not engine.is_sleeping()
        assert await engine.collective_rpc("get_weight_version") == [engine.weight_version]

    run(main())
