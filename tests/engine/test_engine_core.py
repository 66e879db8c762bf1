"""The class _core.Engine: parameters, output, one driver, and every way to close it."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmpy import LLM, _core, errors

VOCAB = 131
TOKEN_BYTES = [bytes([97 + i % 26]) for i in range(VOCAB)]


def ids(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


@pytest.fixture(scope="module")
def model(open_model: Callable[..., _core.Model]) -> _core.Model:
    return open_model()


@pytest.fixture
def engine(model: _core.Model) -> Iterator[_core.Engine]:
    engine = _core.Engine(model, {"token_bytes": TOKEN_BYTES, "eos_token_ids": [2], "max_logprobs": 4})
    yield engine
    engine.close()


def finish(engine: _core.Engine) -> list[Any]:
    while engine.run(1000):
        pass
    engine.check()
    return engine.take(True)


def one(engine: _core.Engine, prompt: bytes, **params: object) -> Any:
    number = engine.submit(prompt, {"seed": 1, "temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params})
    (output,) = finish(engine)
    assert output["request"] == number
    return output


def test_output(engine: _core.Engine) -> None:
    output = one(engine, ids(5, 6, 7), logprobs=2, prompt_logprobs=3)
    assert (output["sample"], output["finish"], output["first"], output["is_last"]) == (0, "length", 0, True)
    assert len(output["ids"]) == 8 * 4
    assert [len(a) for a in output["logprobs"]] == [8 * 4] * 5
    assert [len(a) for a in output["top"]] == [8 * 2 * 4] * 3
    assert [len(a) for a in output["prompt_logprobs"]] == [2 * 4] * 2
    assert [len(a) for a in output["prompt_top"]] == [2 * 3 * 4] * 3
    best = np.frombuffer(output["top"][0], np.int32).reshape(8, 2)[:, 0]
    assert best.tolist() == np.frombuffer(output["ids"], np.int32).tolist()  # greedy
    assert list(output["times"]) == sorted(output["times"])
    assert output["times"][0] <= time.monotonic()
    plain = one(engine, ids(5, 6, 7))
    assert plain["ids"] == output["ids"]
    assert plain["logprobs"] is plain["top"] is plain["prompt_logprobs"] is plain["prompt_top"] is None


def test_stepwise_output_add_up(engine: _core.Engine) -> None:
    whole = one(engine, ids(9, 8, 7), logprobs=1)
    engine.submit(ids(9, 8, 7), {"seed": 1, "temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 1})
    parts = []
    while engine.has_unfinished():
        assert engine.step()
        parts += engine.take(False)
    assert not engine.step()
    assert len(parts) == 8
    assert [p["first"] for p in parts] == list(range(8))
    assert [p["finish"] for p in parts] == [None] * 7 + ["length"]
    assert b"".join(p["ids"] for p in parts) == whole["ids"]
    assert b"".join(p["logprobs"][0] for p in parts) == whole["logprobs"][0]


def test_stop_rules(engine: _core.Engine) -> None:
    tokens = np.frombuffer(one(engine, ids(3, 4))["ids"], np.int32).tolist()
    stop = TOKEN_BYTES[tokens[0]] + TOKEN_BYTES[tokens[1]]
    output = one(engine, ids(3, 4), stop=[b"\xff", stop])
    assert (output["finish"], output["stop"], len(output["ids"]) // 4) == ("stop_string", 1, 2)
    output = one(engine, ids(3, 4), stop_token_ids=[tokens[0], 10**12])
    assert (output["finish"], output["stop"], len(output["ids"]) // 4) == ("stop_id", tokens[0], 1)
    output = one(engine, ids(3, 4), prior=ids(2), ignore_eos=False)
    assert (output["finish"], output["ids"]) == ("eos", b"")
    output = one(engine, ids(3, 4), allowed_token_ids=[7], logit_bias={7: -float("inf")})
    assert (output["finish"], output["status"], output["error_position"]) == ("error", 2, 2)


def test_bans_and_biases(engine: _core.Engine) -> None:
    first = int(np.frombuffer(one(engine, ids(3, 4), max_tokens=1)["ids"], np.int32)[0])
    for params in ({"bad_words": [[first]]}, {"logit_bias": {first: -1000.0}}, {"logit_bias": {first: -float("inf")}}):
        assert one(engine, ids(3, 4), max_tokens=1, **params)["ids"] != ids(first)
    assert one(engine, ids(3, 4), allowed_token_ids=[50])["ids"] == ids(*[50] * 8)
    assert one(engine, ids(3, 4), top_k=-1, logit_bias={50: 1e6})["ids"] == ids(*[50] * 8)


def test_ids_that_are_never_drawn(device: str, tiny_model: Callable[[str, str], Path]) -> None:
    options = {"device": device, "skip_tokenizer_init": True, "kv_cache_memory_bytes": 16 << 20, "max_model_len": 64}
    drawn = {"temperature": 50.0, "max_tokens": 40, "ignore_eos": True, "seed": 1, "use_tqdm": False}
    with LLM(tiny_model("llama", "float32"), **options) as llm:
        assert max(llm.generate([[1, 2]], **drawn)[0].token_ids) >= 20
    banned = list(range(0, 20, 2))
    with LLM(tiny_model("llama", "float32"), vocab_limit=20, banned_token_ids=banned, **options) as llm:
        found = set(llm.generate([[1, 2]], **drawn)[0].token_ids)
    assert len(found) > 2
    assert found <= set(range(1, 20, 2))


def test_samples_and_scores(engine: _core.Engine) -> None:
    engine.submit(ids(5, 6, 7), {"seed": 3, "temperature": 2.0, "max_tokens": 5, "n": 3, "ignore_eos": True})
    output = finish(engine)
    assert sorted(n["sample"] for n in output) == [0, 1, 2]
    assert [n["is_last"] for n in output] == [False, False, True]
    score = one(engine, ids(5, 6, 7, 8), score_start=2, logprobs=1, temperature=1.0)
    assert (score["finish"], score["ids"], score["num_cached_tokens"]) == ("length", b"", 0)
    assert len(score["prompt_logprobs"][0]) == 2 * 4
    assert len(score["prompt_top"][0]) == 2 * 4


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ({}, TypeError, "misses the parameter 'seed'"),
        ({"seed": 1, "sede": 1}, TypeError, "unexpected parameter 'sede'"),
        ({"seed": -1}, OverflowError, ""),
        ({"seed": 1, "n": "many"}, TypeError, ""),
        ({"seed": 1, "n": -1}, errors.InvalidRequestError, r"n must be in \[0, 2\*\*32\), got -1"),
        ({"seed": 1, "stop_token_ids": 5}, TypeError, ""),
        ({"seed": 1, "stop": ["text"]}, TypeError, ""),
        ({"seed": 1, "prior": b"abc"}, errors.InvalidRequestError, "prior must be int32 values"),
        ({"seed": 1, "logprobs_mode": "rough"}, errors.InvalidRequestError, "logprobs_mode must be one of"),
        ({"seed": 1, "allowed_token_ids": []}, errors.InvalidRequestError, "allowed_token_ids is not None and empty!"),
        ({"seed": 1, "logit_bias": {VOCAB: 1.0}}, errors.InvalidRequestError, "out-of-vocab token ids. Vocabulary size: 131"),
        ({"seed": 1, "repetition_penalty": 1e-7}, errors.InvalidRequestError, r"_penalty must be in \[1e-06, 1e\+06\]"),
        ({"seed": 1, "repetition_penalty": 1e7}, errors.InvalidRequestError, r"_penalty must be in \[1e-06, 1e\+06\]"),
        ({"seed": 1, "logit_bias": {3: 3.4e38}}, errors.InvalidRequestError, "logit_bias values must be -inf, which bans"),
        ({"seed": 1, "logit_bias": {3: -3.4e38}}, errors.InvalidRequestError, "logit_bias values must be -inf, which bans"),
        ({"seed": 1, "score_start": 1, "temperature": 1e-38}, errors.InvalidRequestError, "temperature must be at least 1e-05"),
        ({"seed": 1, "logprobs": 5}, errors.InvalidRequestError, "Requested sample logprobs of 5"),
    ],
)  # fmt: skip
def test_refusals(engine: _core.Engine, params: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text or None):
        engine.submit(ids(1, 2), params)
    assert not engine.has_unfinished()
    with pytest.raises(errors.InvalidRequestError, match="out of vocabulary") as caught:
        engine.submit(ids(VOCAB), {"seed": 1})
    assert caught.value.parameter == "prompt"


def test_bad_options(model: _core.Model) -> None:
    with pytest.raises(TypeError, match="unexpected option 'eos'"):
        _core.Engine(model, {"eos": [1]})
    with pytest.raises(TypeError):
        _core.Engine(None, {})  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="scheduling_policy must be"):
        _core.Engine(model, {"policy": "random"})
    with pytest.raises(errors.ConfigError, match="vocab_limit must be"):
        _core.Engine(model, {"vocab_limit": 10**6})
    plain = _core.Engine(model, {})
    with pytest.raises(errors.InvalidRequestError, match="stop needs a tokenizer"):
        plain.submit(ids(1), {"seed": 1, "stop": [b"x"]})


def test_failed_allocations_change_nothing(engine: _core.Engine) -> None:
    params = {"seed": 1, "max_tokens": 2, "stop": [b"zzz"], "bad_words": [[1, 2]], "logit_bias": {3: 1.0}, "n": 2, "salt": b"x"}
    failures = 0
    while True:
        _core.fail_allocation_after(failures)
        try:
            engine.submit(ids(1, 2, 3), params)
            break
        except MemoryError:
            assert not engine.has_unfinished()
            failures += 1
        finally:
            _core.fail_allocation_after(-1)
    assert failures > 5
    assert len(finish(engine)) == 2
    assert engine.stats()["allocations_since_warmup"] == 0


def test_abort_and_reset(engine: _core.Engine) -> None:
    long = {"seed": 1, "max_tokens": 200, "ignore_eos": True}
    numbers = [engine.submit(ids(1, 2, i), long) for i in range(3)]
    engine.step()
    engine.abort([numbers[1], 10**9])
    engine.step()
    assert [n["request"] for n in engine.take(True)] == [numbers[1]]
    engine.reset_prefix_cache(True)
    engine.step()
    assert engine.stats()["num_preemptions"] == 2
    engine.abort(None)
    assert {n["finish"] for n in engine.take(True)} == {"abort"}
    assert not engine.has_unfinished()
    stats = engine.stats()
    assert stats["kv_blocks_free"] == stats["kv_blocks_total"]


def test_one_driver_and_close_from_another_thread(open_model: Callable[..., _core.Model]) -> None:
    engine = _core.Engine(open_model(max_model_len=1 << 14, kv_cache_bytes=256 << 20), {})
    for i in range(8):
        engine.submit(ids(1, i), {"seed": 1, "max_tokens": 16000, "ignore_eos": True})
    results: list[object] = []

    def drive() -> None:
        try:
            results.append(engine.run(600_000))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=drive)
    thread.start()
    while engine.stats()["num_steps"] < 3:
        time.sleep(0.001)
    for call in (engine.step, engine.check, lambda: engine.take(True), lambda: engine.run(1)):
        with pytest.raises(errors.EngineBusyError, match="engine is in use by another thread"):
            call()
    engine.submit(ids(3), {"seed": 1, "max_tokens": 1})  # from any thread
    engine.close()
    thread.join(60)
    assert results == [True] or isinstance(results[0], errors.EngineClosedError)
    engine.close()
    for call in (engine.step, engine.has_unfinished, engine.stats, lambda: engine.submit(ids(1), {"seed": 1})):
        with pytest.raises(errors.EngineClosedError, match="engine is closed"):
            call()


def test_a_child_process_may_not_use_it(engine: _core.Engine) -> None:
    child = os.fork()
    if child == 0:
        try:
            engine.step()
        except errors.EngineClosedError as error:
            os._exit(0 if f"engine belongs to process {os.getppid()}" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert one(engine, ids(1))["finish"] == "length"
