"""examples/backend, a package with a backend in plain C, installed beside llmpy: it gives the CPU's tokens.

It is compiled against the installed header alone. Its device's memory has addresses that the host cannot use, so a pointer that
the core follows itself crashes the test. What the backend lacks the core composes.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmpy import LLM, ConfigError, DeviceError, UnsupportedError, _core, cli, devices, hardware
from llmpy.engine import backends

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 100, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "Llama": ({}, "rope_table, sample"),
    "Mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, "rope_table, route, sample"),
    "Gemma2": ({"sliding_window": 8, "query_pre_attn_scalar": 16}, "rope_table, scale_logits, sample"),
    "Ministral3": ({"rope_parameters": YARN}, "rope_table, position_scale, sample"),
}
"""Configurations, and what the core computes on the host for them."""
PROMPTS = [[1, 2, 3], list(range(40)), [5], [*range(40), 7]]


@pytest.fixture(scope="module", autouse=True)
def installed(install_example: Callable[..., Path]) -> Iterator[None]:
    """The example, built by pip in a folder of its own and found there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(install_example("backend")))
        backends.library.cache_clear()
        yield
    backends.library.cache_clear()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    """Makes an LLM of a family with random weights."""
    made: list[LLM] = []

    def make(family: str, device: str, extra: dict[str, Any] | None = None, **options: Any) -> LLM:
        config = {"architectures": [f"{family}ForCausalLM"], **SMALL, **(MODELS[family][0] if family in MODELS else {})}
        (tmp_path / "config.json").write_text(json.dumps(config))
        given: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32"}
        given |= {"kv_cache_memory_bytes": "4MiB"} | options
        made.append(LLM(tmp_path, device=device, **given))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def greedy(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts, temperature=0, max_tokens=12, ignore_eos=True)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("family", MODELS)
def test_tokens_are_the_cpus(family: str, make: Callable[..., LLM], caplog: pytest.LogCaptureFixture) -> None:
    wanted = greedy(make(family, "cpu"))
    llm = make(family, "plain:0")
    assert greedy(llm) == wanted and len(set(wanted)) > 1
    assert llm.on_host == MODELS[family][1] and f"plain:0 (host: {llm.on_host})" in repr(llm)
    assert [record.message for record in caplog.records if f"{llm.on_host} run on the host" in record.message]


def test_a_row_does_not_depend_on_its_batch(make: Callable[..., LLM]) -> None:
    llm = make("Llama", "plain", max_num_batched_tokens=16, max_num_seqs=4)
    together = llm.generate(PROMPTS, temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    for prompt, output in zip(PROMPTS, together, strict=True):
        [alone] = llm.generate([prompt], temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].cumulative_logprob == output.outputs[0].cumulative_logprob


def test_samples_that_share_a_page(make: Callable[..., LLM]) -> None:
    """Each of three samples of a prompt gets a copy of the prompt's last page, which is not full."""
    options = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True, "top_p": 0.9}
    found = []
    for device in ("cpu", "plain"):
        outputs = make("Llama", device).generate(PROMPTS, **options)
        found.append([tuple(one.token_ids) for output in outputs for one in output.outputs])
    assert found[0] == found[1] and len(set(found[0])) == 3 * len(PROMPTS)


def test_values_are_rounded_to_the_activations_type(make: Callable[..., LLM]) -> None:
    """What the host computes on rows of bfloat16 is rounded once: queries that grow with the position."""
    llm = make("Ministral3", "plain", dtype="bfloat16")
    names = [line.split()[0] for line in llm.program()]
    number = names.index("position_scale")
    assert names[number - 1] == "rope"
    [tapped] = llm.tap([list(range(100))], [number - 1, number])
    factors = (1 + 0.5 * np.log1p(np.arange(100) // 16)).astype(np.float32)
    exact = (tapped[number - 1] * factors[:, None]).astype(np.float32)
    bits = exact.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    assert (tapped[number] == rounded).mean() > 0.999 and np.abs(tapped[number] - exact).max() <= np.abs(exact).max() / 256


def test_what_is_missing_is_named(make: Callable[..., LLM]) -> None:
    with pytest.raises(UnsupportedError, match="plain: wanted the operation layer_norm, the backend has none"):
        make("Cohere", "plain")
    with pytest.raises(ConfigError, match="the backend plain does not tell its device's memory; set kv_cache_memory_bytes"):
        make("Llama", "plain", kv_cache_memory_bytes=None)
    with pytest.raises(DeviceError, match="device 'plain:3': there is plain:0 alone"):
        make("Llama", "plain:3")
    llm = make("Llama", "plain")
    with pytest.raises(UnsupportedError, match='the backend "plain" cannot free memory'):
        llm.sleep(level=1)


@pytest.mark.parametrize("operation", ["layer_norm", "conv", "head_linear", "splice"])
def test_a_model_is_refused_by_the_operation_that_it_needs(operation: str, refusal_of: Callable[[str, str], str]) -> None:
    assert refusal_of("plain", operation) == f"plain: wanted the operation {operation}, the backend has none"
    assert not refusal_of("cpu", operation)


def test_the_table_of_operations(page_column: Callable[[str], dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    """The page has what `llmpy devices --operations` prints."""
    found = hardware.operations_by_kind()
    assert set(found["cpu"].values()) == {"device"} and set(_core.operations()) < set(found["cpu"])
    assert [page_column(kind) for kind in ("cpu", "plain")] == [found["cpu"], found["plain"]]
    assert cli.main(["devices", "--operations"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[1::2] == ["operation", *found] and len(lines) == 2 + len(found["cpu"])
    [cells] = [line.split()[1::2] for line in lines if line.split()[1:2] == ["layer_norm"]]
    assert cells == ["layer_norm", *(places["layer_norm"] for places in found.values())]
    assert found["plain"]["layer_norm"] == "refused"


def test_it_is_listed() -> None:
    assert [one["device"] for one in devices() if one["name"] == "plain" and one["available"]] == ["plain:0"]
