"""PLaMo 2: numbers of parameters and sizes of states for the published models, and refusals."""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmpy import UnsupportedError, models

ONE_B = {
    "vocab_size": 100000, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 1,
    "hidden_size_per_head": 128, "mamba_num_heads": 32, "mamba_d_state": 64, "intermediate_size": 8192,
}  # fmt: skip
EIGHT_B = {
    "vocab_size": 100000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 4,
    "hidden_size_per_head": 128, "mamba_num_heads": 64, "mamba_d_state": 64, "intermediate_size": 16384,
}  # fmt: skip
TWO_B = {**ONE_B, "vocab_size": 100032, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 4,
         "mamba_num_heads": 64, "intermediate_size": 5632}  # fmt: skip


@pytest.fixture()
def program(tmp_path: Path, files_of: Callable[..., SimpleNamespace]) -> Callable[..., models.Spec]:
    """The program of a configuration, without a checkpoint."""

    def load(fields: dict[str, object]) -> models.Spec:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Plamo2ForCausalLM"], **fields}))
        return models.load(files_of(tmp_path), None).spec

    return load


def closed_form(f: dict[str, int]) -> int:
    """The number of parameters with a tied head."""
    h, n, k, m = f["hidden_size"], f["mamba_d_state"], 4, f["mamba_num_heads"]
    size, heads, kv = f["hidden_size_per_head"], f["num_attention_heads"], f["num_key_value_heads"]
    d, r = m * size, max(64, h // 16)
    mamba = 3 * d * h + d * k + d * (r + 2 * n) + r * m + 3 * m + r + 2 * n
    attention = 2 * (heads + kv) * size * h + (heads + kv) * size
    layers = f["num_hidden_layers"]
    return layers // 2 * (mamba + attention) + layers * (3 * h * f["intermediate_size"] + 4 * h) + f["vocab_size"] * h + h


@pytest.mark.parametrize(("fields", "published"), [(ONE_B, 1291441920), (EIGHT_B, 9118372864), (TWO_B, None)])
def test_parameters_and_states(fields, published, program) -> None:
    spec = program(fields)
    n = sum(part.rows * weight["cols"] for weight in spec["weights"] for part in weight["parts"])
    assert n == closed_form(fields) == (published or n)
    d, layers = fields["mamba_num_heads"] * 128, fields["num_hidden_layers"]
    assert sum(map(prod, spec["states"])) == layers // 2 * (d * fields["mamba_d_state"] + 3 * d)
    assert len(spec["layers"]) == layers // 2 and {layer[3] for layer in spec["layers"]} == {2049}


def test_what_is_refused(program) -> None:
    for field in ({"linear_type": "fp8"}, {"eval_attention_n_bit": 8}):
        with pytest.raises(UnsupportedError, match=next(iter(field))):
            program(ONE_B | field)
