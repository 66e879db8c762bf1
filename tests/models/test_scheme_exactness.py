"""Every scheme: logits near float64 of the exact weights, and the same bits however a request is computed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from modules import load
from packed_files import LAYOUTS, SORTED, open_llm, quantise, quantise_fp8

from llmpy import LLM, RequestOutput, SamplingParams
from llmpy.models.interpret import Interpreter

tables = load(Path(__file__).with_name("test_tables.py"), "llmpy_test_tables")
loads = load(Path(__file__).with_name("test_quantise_load.py"), "llmpy_test_quantise_load")
FLOAT, FLIPS, FARTHER = 1e-5, 0.01, 1.5
"""Norm of the logits' errors over that of what is wanted. FLOAT: of float32 sums. FLIPS: where activations are rounded to 8
bits, one that lies between two numbers may take the other; of 128 columns, whose largest is 2.4 times their mean, a step is
2.4 / 127 / sqrt(128) = 0.2 % of the norm, and there are few. FARTHER: of columns in another order, where other activations
share a scale, over the error of that arithmetic."""
ARITHMETICS = "float", "int8"
GGUF = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
WHOLE = {"hidden_size": 256, "intermediate_size": 256}  # of blocks of K types
QUICK = ("awq", "gptq-8", "sorted", "nf4", "load int4", "Q4_K")
"""Cases of the default run; the slow tests have all."""
SCHEMES = (
    "awq", "gptq-8", "sorted", "nf4", "load int4", "Q4_K", "gptq-asym", "rows-8-64", "int8", "fp4", "squeezellm", "fp8 file",
    *(f"load {scheme}" for scheme in loads.ROUND if scheme != "int4"), *(kind for kind in GGUF if kind != "Q4_K"),
)  # fmt: skip
CASES = [pytest.param(scheme, marks=() if scheme in QUICK else pytest.mark.slow) for scheme in SCHEMES]
Made = tuple[Path, Path, dict[str, object]]


@pytest.fixture
def make(tiny, gguf_of, tmp_path: Path) -> Callable[[str], Made]:
    """The model of a scheme, a model whose exact values are the same, and the options that load the first."""

    def write(scheme: str) -> Made:
        kind, _, rounding = scheme.partition(" ")
        source = tiny("llama", **(WHOLE if scheme in GGUF else loads.SIZES)).directory
        if scheme in GGUF:
            path = gguf_of(tiny("llama", **WHOLE), tmp_path / "tiny.gguf", scheme)
            return path, path, {}
        if kind == "load":
            return source, loads.rounded(source, tmp_path / "plain", rounding), {"quantization": rounding}
        if kind == "fp8":
            return quantise_fp8(source, tmp_path / "fp8", tmp_path / "plain"), tmp_path / "plain", {}
        if scheme in tables.LAYOUTS and scheme not in LAYOUTS:
            path = tables.quantise(tiny("llama", **tables.SIZES).directory, tmp_path, scheme)
        else:
            path = quantise(source, tmp_path, SORTED["gptq"] if scheme == "sorted" else LAYOUTS[scheme])
        return path / "packed", path / "plain", {}

    return write


def arithmetics(scheme: str) -> tuple[str, ...]:
    """The arithmetics of a scheme on the CPU that differ."""
    kinds = ("nf4", "fp4", "squeezellm", "fp8 file", "load fp8", "load nf4", "MXFP4")
    return ARITHMETICS[:1] if scheme in kinds else ARITHMETICS


def error_of(have: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(have - wanted) / np.linalg.norm(wanted))


def in_blocks(x: np.ndarray) -> np.ndarray:
    """Rows whose blocks of 32 values are rounded to 8 bits, as in docs/use/quantization.md."""
    blocks = x.astype(np.float32).reshape(len(x), -1, 32)
    most = np.maximum(np.abs(blocks).max(-1, keepdims=True), np.float32(1e-30))
    return (np.rint(blocks * (np.float32(127) / most)) * (most / np.float32(127)).astype(np.float64)).reshape(x.shape)


class Rounding(Interpreter):
    """Float64 of the exact weights and of rounded activations."""

    rounds_head = False

    def _run(self, name: str, op: dict, x: list[np.ndarray]) -> list[np.ndarray]:
        return super()._run(name, op, [in_blocks(each) for each in x] if name == "linear" else x)

    def last(self, number: int) -> np.ndarray:
        at = self.spec["ops"][number][1]["in"][0]
        if self.rounds_head:
            self.values[at] = in_blocks(self.values[at])
        return super().last(number)


@pytest.mark.parametrize("scheme", CASES)
def test_near_float64(make: Callable[[str], Made], oracle, prompts, scheme: str) -> None:
    path, plain, options = make(scheme)
    ids = prompts[2]
    exact = oracle(plain)
    wanted, found = {"float": exact.logits(ids)}, {}
    exact.interpreter.__class__ = Rounding
    exact.interpreter.rounds_head = scheme in GGUF
    wanted["int8"] = exact.logits(ids)
    for arithmetic in arithmetics(scheme):
        with open_llm(path, dtype="float32", activation_dtype=arithmetic, **options) as llm:
            found[arithmetic] = llm.tap([ids], ["logits"])[0]["logits"]
    assert error_of(found["float"], wanted["float"]) < FLOAT
    if "int8" in found:
        of_rounding = error_of(wanted["int8"], wanted["float"])
        assert 100 * FLOAT < error_of(found["int8"], wanted["float"]) < FARTHER * of_rounding
        if scheme != "sorted":
            assert error_of(found["int8"], wanted["int8"]) < FLIPS
            assert min(map(error_of, found["int8"], wanted["int8"])) < FLOAT  # the rows before the first of these


def bits(output: RequestOutput) -> tuple[bytes, bytes]:
    return output.outputs[0].token_ids_array.tobytes(), output.outputs[0].logprobs.values.tobytes()


@pytest.mark.parametrize("scheme", CASES)
def test_cached_preempted_scored(make: Callable[[str], Made], prompts, scheme: str) -> None:
    """The bits of each request alone, without a cache."""
    path, _, options = make(scheme)
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2, ignore_eos=True)
    batch = [prompt[:40] for prompt in (*prompts[2:], *prompts)]

    def answers(llm: LLM) -> list[tuple[bytes, bytes]]:
        return [bits(output) for output in llm.generate(batch, params, use_tqdm=False)]

    for arithmetic in arithmetics(scheme):
        chosen = {**options, "dtype": "float32", "activation_dtype": arithmetic}
        with open_llm(path, enable_prefix_caching=False, **chosen) as llm:
            wanted = [bits(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt in batch]
        with open_llm(path, max_num_batched_tokens=16, **chosen) as llm:
            assert answers(llm) == wanted
            again = llm.generate(batch, params, use_tqdm=False)
            assert [bits(output) for output in again] == wanted
            assert max(output.num_cached_tokens for output in again) >= 32
            whole = [prompt + output.token_ids for prompt, output in zip(batch, again, strict=True)]
            for prompt, output, score in zip(batch, again, llm.score(whole, use_tqdm=False), strict=True):
                scored = score.token_logprobs[len(prompt) - score.start :]
                assert scored.tobytes() == np.asarray(output.outputs[0].sampled.raw).tobytes()
            n_blocks = llm.stats().kv_blocks_total
        small = {"max_model_len": 64, "kv_cache_memory_bytes": (32 << 20) // n_blocks * 7}
        with open_llm(path, **chosen, **small) as llm:
            assert answers(llm) == wanted
            assert llm.stats().num_preemptions > 0
