"""Arguments that embed(), classify() and encode() accept and refuse, and their mix with generation."""

import asyncio
import json
import pickle

import numpy as np
import pytest

from llmpy import (
    AsyncEngine,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    InvalidRequestError,
    PoolingParams,
    PoolingRequestOutput,
    RequestFailedError,
    UnsupportedError,
)


def test_params_are_checked():
    assert PoolingParams() == PoolingParams(pooling=None, normalize=None, dimensions=None, use_activation=None)
    assert pickle.loads(pickle.dumps(PoolingParams(pooling="mean"))).pooling == "mean"
    with pytest.raises(InvalidRequestError, match=r"^pooling must be one of 'last', 'mean', 'cls', 'all', got 'max'"):
        PoolingParams(pooling="max")
    with pytest.raises(InvalidRequestError, match=r"^dimensions must be at least 1, got 0"):
        PoolingParams(dimensions=0)
    for fields in ({"normalize": 1}, {"use_activation": "yes"}, {"dimensions": 2.0}, {"task": "embed"}):
        with pytest.raises(TypeError):
            PoolingParams(**fields)
    with pytest.raises(AttributeError):
        PoolingParams().normalize = False


def test_a_list_of_embeddings_is_a_table(open_tiny):
    pytest.importorskip("pandas")
    embedded = open_tiny().embed(text for text in ["a", "b"])
    frame = embedded.to_pandas()
    assert frame["prompt"].tolist() == ["a", "b"] and frame["data"][1].tolist() == embedded.numpy()[1].tolist()
    assert type(embedded + embedded) is type(embedded) and (embedded + embedded).numpy().shape[0] == 4
    pytest.importorskip("pyarrow")
    assert embedded.to_arrow().num_rows == 2


def test_what_is_refused(open_tiny):
    llm = open_tiny()
    for call, text in {
        lambda: llm.encode([5]): "^pooling_task is required",
        lambda: llm.encode([5], pooling_task="x"): "^pooling_task must be one of 'embed'",
        lambda: llm.embed([5], pooling="all"): r"^pooling must be 'last', 'mean' or 'cls' for LLM.embed\(\), got 'all'",
        lambda: llm.encode([5], pooling_task="token_embed", pooling="cls"): "^pooling must be 'all' for LLM.encode",
        lambda: llm.embed([5], use_activation=True): r"^use_activation does not apply to LLM.embed\(\)",
        lambda: llm.embed([5], dimensions=65): "^dimensions must be at most 64, the model's, got 65",
        lambda: llm.embed([[5], []]): "^prompt 1: The prompt cannot be empty",
        lambda: llm.embed([[5], [304]]): "^prompt 1: Token id 304 is out of vocabulary",
        lambda: llm.embed([[5] * 1000]): "^The prompt .length 1000. is longer than the maximum model length of",
        lambda: llm.embed([5, 6], [PoolingParams()] * 2): "^The lengths of prompts .1. and params .2. must be the same",
        lambda: llm.embed({"prompt_token_ids": [5], "output_token_ids": [6]}): "not output_token_ids",
    }.items():
        with pytest.raises(InvalidRequestError, match=text):
            call()
    with pytest.raises(TypeError, match="not both"):
        llm.embed([5], PoolingParams(), normalize=False)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'normalise'. Did you mean 'normalize'"):
        llm.embed([5], normalise=False)
    with pytest.raises(UnsupportedError, match=r"^LLM.encode\(pooling_task='classify'\) is only supported for classif"):
        llm.encode([5], pooling_task="classify")
    returned = llm.embed([[5], [304], [6]], on_error="return")
    assert [output.error is None for output in returned] == [True, False, True] and returned[1].outputs.embedding.size == 0
    assert llm.embed([]) == [] and llm.embed([5])[0].error is None


def test_outputs(open_tiny):
    llm = open_tiny()
    (output,) = llm.embed("hello")
    assert type(output) is EmbeddingRequestOutput and output.finished and output.prompt == "hello" and output.index == 0
    assert output.prompt_token_ids == llm.tokenizer.encode("hello") and output.outputs.hidden_size == 64
    assert not output.outputs.embedding.flags.writeable and np.isclose(np.linalg.norm(output.outputs.embedding), 1)
    assert json.loads(json.dumps(output.to_dict()))["outputs"]["embedding"][0] == pytest.approx(output.outputs.embedding[0])
    assert repr(output).startswith("EmbeddingRequestOutput(0, ") and repr(output).endswith("tokens, 64)")
    (state,) = llm.encode("hello", pooling_task="token_embed", normalize=False)
    assert type(state) is PoolingRequestOutput and state.outputs.data.shape == (len(output.prompt_token_ids), 64)
    assert ClassificationRequestOutput.__mro__[1] is PoolingRequestOutput


def test_async_engine_mixes_them_with_generation(device, tiny_model, open_tiny):
    """States and tokens have the same bits as alone."""
    prompts = [[5, 6, 7], list(range(3, 60)), [9], list(range(3, 40))]
    llm = open_tiny()
    vectors = [output.outputs.data.tobytes() for output in llm.encode(prompts, pooling_task="embed", pooling="mean")]
    tokens = llm.generate(prompts, max_tokens=12, temperature=0, ignore_eos=True).token_ids

    async def main():
        options = {"device": device, "max_num_batched_tokens": 16, "max_num_seqs": 4, "kv_cache_memory_bytes": "16MiB"}
        async with await AsyncEngine.create(tiny_model, **options) as engine:
            streams = [engine.generate(ids, max_tokens=12, temperature=0, ignore_eos=True) for ids in prompts]
            pending = [engine.encode(ids, pooling_task="embed", pooling="mean") for ids in prompts * 2]
            states = await asyncio.gather(*pending)
            outputs = [await stream for stream in streams]
            assert [output.outputs.data.tobytes() for output in states] == vectors * 2
            assert [output.token_ids for output in outputs] == tokens
            embedded = await asyncio.gather(*[engine.embed(ids, pooling="mean") for ids in prompts])
            assert {type(output) for output in embedded} == {EmbeddingRequestOutput}
            assert [output.outputs.embedding.tobytes() for output in embedded] == vectors
            with pytest.raises(UnsupportedError, match=r"AsyncEngine\.classify\(\)"):
                engine.classify([5])
            with pytest.raises(InvalidRequestError, match="pooling_task is required"):
                engine.encode([5])
            await engine.pause("keep")
            late = engine.encode([5], pooling_task="embed", request_id="late")
            assert late.request_id == "late" and await engine.abort("late") == []
            with pytest.raises(RequestFailedError, match="request was aborted"):
                await late
            await engine.resume()
            assert await engine.wait_for_requests_to_drain(10)
            engine.check()

    asyncio.run(main())
