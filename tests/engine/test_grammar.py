"""Structured outputs in the engine: a request's mask does not depend on the batch, preemption or overlap of steps."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmpy import LLM, RequestOutput, SamplingParams, StructuredOutputsParams

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "n": {"type": "integer", "minimum": -99, "maximum": 999},
        "on": {"type": "boolean"},
    },
    "required": ["name", "n", "on"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
KINDS: list[dict[str, Any]] = [
    {"regex": "[a-f]{10,20}z"},
    {"json": SCHEMA},
    {"choice": ["red", "green", "yellow and blue"]},
    {"grammar": 'start: word (" " word){0,3}\nword: /[a-z]{2,4}/'},
]
PROMPTS = ["hello", "the quick brown fox jumps over the lazy dog", "a", "one two three four five six seven"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, write_model: Any) -> Path:
    return write_model(tmp_path_factory.mktemp("grammar"))


def open_llm(model: Path, device: str, **options: Any) -> LLM:
    return LLM(model, **({"device": device, "kv_cache_memory_bytes": "16MiB"} | options))


def params(i: int, **changes: Any) -> SamplingParams:
    """Every third request is free; of the others one is greedy, and one has penalties, which keep steps from overlapping."""
    structured = StructuredOutputsParams(**KINDS[i % 4]) if i % 3 else None
    common = {"max_tokens": 40, "logprobs": 2, "seed": i, "structured_outputs": structured, "n": 3 if i == 7 else 1}
    more = {"temperature": 0.0} if i == 1 else {"repetition_penalty": 1.1, "top_p": 0.9} if i == 5 else {"top_k": 90}
    return SamplingParams(**(common | more | changes))


BATCH = [(PROMPTS[i % 4], i) for i in range(12)]


def bits(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [
        (s.token_ids, s.finish_reason, *(part.tobytes() for part in s.sampled), s.logprobs.values.tobytes())
        for s in output.outputs
    ]


def run(llm: LLM) -> list[Any]:
    prompts, given = [prompt for prompt, _ in BATCH], [params(i) for _, i in BATCH]
    return [bits(output) for output in llm.generate(prompts, given, use_tqdm=False)]


@pytest.fixture(scope="module")
def alone(model: Path, device: str) -> list[Any]:
    with open_llm(model, device, enable_prefix_caching=False) as llm:
        return [bits(llm.generate(prompt, params(i))[0]) for prompt, i in BATCH]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 3, "max_num_batched_tokens": 9},
        {"kv_cache_memory_bytes": 10 * 16 * 2 * 2 * 2 * 16 * 4, "max_model_len": 96},
    ],
    ids=["batch", "chunks", "preemption"],
)
def test_law_2(model: Path, device: str, alone: list[Any], options: dict[str, Any]) -> None:
    with open_llm(model, device, **options) as llm:
        assert run(llm) == alone
        assert run(llm) == alone  # with cached prompts and compiled grammars
        llm.check()
        assert bool(llm.stats().num_preemptions) == ("kv_cache_memory_bytes" in options)


def test_every_text_fits_its_grammar(model: Path, device: str) -> None:
    with open_llm(model, device) as llm:
        outputs = llm.generate(["x"] * 4, [params(0, structured_outputs=kind, max_tokens=100, n=4) for kind in KINDS])
        for kind, output in zip(KINDS, outputs, strict=True):
            for sample in output.outputs:
                assert sample.finish_reason == "stop" and sample.stop_reason is None
                if "json" in kind:
                    assert set(json.loads(sample.text)) == {"name", "n", "on"}
                elif "choice" in kind:
                    assert sample.text in kind["choice"]
                else:
                    assert re.fullmatch(kind.get("regex", "[a-z]{2,4}( [a-z]{2,4}){0,3}"), sample.text)


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema that allows only short texts."""
    kind = rng.choice(["integer", "string", "enum", "pattern", "null"] + ["object", "array", "any"] * (depth < 2))
    if kind == "object":
        names = rng.sample(["a", "b_c", "ü", 'x"y', ""], rng.randint(0, 3))
        parts = {name: random_schema(rng, depth + 1) for name in names}
        required = [name for name in names if rng.random() < 0.7]
        return {"type": "object", "properties": parts, "required": required, "additionalProperties": False}
    if kind == "array":
        least = rng.randint(0, 2)
        return {
            "type": "array",
            "items": random_schema(rng, depth + 1),
            "minItems": least,
            "maxItems": least + rng.randint(0, 2),
        }
    if kind == "any":
        return {"anyOf": [random_schema(rng, depth + 1), random_schema(rng, depth + 1)]}
    if kind == "integer":
        return {"type": "integer", "minimum": rng.randint(-90, 0), "maximum": rng.randint(0, 9999)}
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-f]{1,4}$", "^(yes|no)$", "^[0-9]{2}:[0-9]{2}$"])}
    return {"enum": rng.sample([1, "one", None, True, [2], {"k": "v"}], 3)} if kind == "enum" else {"type": "null"}


def test_random_schemas_of_a_random_model(model: Path, device: str) -> None:
    rng = random.Random(5)
    schemas = [random_schema(rng) for _ in range(40)]
    with open_llm(model, device) as llm:
        given = [{**schema, "x-guidance": {"whitespace_pattern": "[ \\n]{0,2}"}} for schema in schemas]
        asked = [SamplingParams(structured_outputs={"json": schema}, max_tokens=200, seed=i) for i, schema in enumerate(given)]
        outputs = llm.generate(["x"] * len(asked), asked)
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.finish_reason == "stop", (schema, output)
        jsonschema.validate(json.loads(output.text), schema)


def test_prior_tokens_are_taken_in(model: Path, device: str) -> None:
    with open_llm(model, device) as llm:
        given = params(0, structured_outputs={"regex": "[a-f]{10,20}z"}, ignore_eos=True)
        whole = llm.generate("hello", given)[0]
        for cut in (1, 5, len(whole.token_ids)):
            prompt = {"prompt": "hello", "output_token_ids": whole.token_ids[:cut]}
            rest = llm.generate(prompt, given)[0]
            assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids and rest.finish_reason == "stop"
        [bad] = llm.generate({"prompt": "hello", "output_token_ids": llm.tokenizer.encode("!")}, given, on_error="return")
        assert "structured_outputs" in str(bad.error)


def test_a_bad_grammar_fails_alone(model: Path, device: str) -> None:
    with open_llm(model, device) as llm:
        kinds: list[Any] = [{"regex": "a{3}"}, {"json": {"type": "integr"}}, {"grammar": "start: ("}, None]
        outputs = llm.generate(
            ["x"] * 4, [SamplingParams(structured_outputs=kind, max_tokens=4) for kind in kinds], on_error="return"
        )
        assert [output.finish_reason for output in outputs] == ["stop", "error", "error", "length"]
        assert outputs[0].text == "aaa"
        for output in outputs[1:3]:
            assert output.error.parameter == "structured_outputs" and "structured_outputs: " in str(output.error)
        assert llm.generate("x", structured_outputs={"choice": ["ok"]})[0].text == "ok"


def test_stopping(model: Path, device: str) -> None:
    with open_llm(model, device) as llm:

        def one(**fields: Any) -> RequestOutput:
            return llm.generate("x", SamplingParams(temperature=0, **fields), on_error="return")[0]

        done = one(structured_outputs={"choice": ["ab"]}, max_tokens=2, ignore_eos=True)
        assert (done.text, done.finish_reason) == ("ab", "stop")
        assert one(structured_outputs={"regex": "a*"}, logit_bias={llm.tokenizer.encode("a")[0]: 99}).finish_reason == "length"
        short = one(structured_outputs={"choice": ["ab"]}, min_tokens=3)
        assert short.error.fields == ("structured_outputs", "min_tokens") and short.text == "ab"
        stop = llm.tokenizer.encode("q")  # no letter of the grammar: only where it accepts
        out = one(structured_outputs={"regex": "[ab]{4}[ab]*"}, stop_token_ids=stop, logit_bias={stop[0]: 1e4})
        assert re.fullmatch("[ab]{4}", out.text) and out.outputs[0].stop_reason == stop[0]
        out = one(structured_outputs={"regex": "[ab]{9}"}, allowed_token_ids=llm.tokenizer.encode("a"))
        assert out.text == "a" * 9


def test_nothing_is_allocated_in_a_step(model: Path, device: str) -> None:
    with open_llm(model, device) as llm:
        run(llm)
        before = llm.stats().allocations_since_warmup
        run(llm)
        assert llm.stats().allocations_since_warmup == before


def test_closing_while_a_grammar_is_compiled(model: Path, device: str) -> None:
    slow = {
        "regex": "(" + "|".join("".join(map(str, row)) for row in np.random.default_rng(0).integers(0, 9, (3000, 12))) + ")"
    }
    llm = open_llm(model, device)
    names = [llm.add_request("x", SamplingParams(structured_outputs=slow)) for _ in range(4)]
    llm.add_request("y", SamplingParams(max_tokens=3))
    llm.abort_request(names[0])
    done = {output.request_id for output in llm.step() if output.finished}
    assert names[0] in done
    llm.close()
