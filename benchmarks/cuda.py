"""Every row of the H200 table: llmpy on one GPU compared with the machine's ceilings and with vLLM 0.26.0.

    python benchmarks/cuda.py [ROW ...] [--rounds 3] [--long-rounds 1] [--limit 520] [--out DIR] [--commit ID]
    python benchmarks/cuda.py --profile ROW [ROW ...] [--eager] [--layers N] [--ranks N]
    python benchmarks/cuda.py --merge results.csv [...]

ROW is a name or a pattern ("8b.step.*"); none means all. Random non-zero weights (load_format="dummy"), bfloat16, token-id
prompts, all different, greedy, ignore_eos, prefix caching on. Medians over rounds, in which the rows of a model take turns;
rows that take seconds have separate rounds.

- step: prompts of 128 tokens, 256 new ones. The mean time between the starts of steps that decode every sequence and compute
  no prompt, so prefill is excluded: ms a step while the context grows from 128 to 384.
- first: wall time of generate() for one new token. cached: the same prompt of 8192 tokens for the second time.
- 1024x256, n8, prefill: wall time of generate() for all requests.
- host: the time of such a step during which the engine's thread does not wait for the device (`step_log`, median).
- import, start: in a fresh process each time; start is the constructor of the 8B model, ready to run.
- exactness: all linears of a step of the 8B model (the head for at most 256 rows) over the time of cuBLASLt with its own choice
  of algorithms, by rows (benchmarks/cuda_linear.py).

"floor" is the time of the bytes and operations that the work needs at least, at the read bandwidth and the bf16 matmul rate
that this script measures first; share = floor / measured. --out DIR writes results.csv. --merge adds such files to
results_h200.csv, where a newer run of a row replaces the older one of the same commit, and renews docs/develop/cuda-speed.md
and the pages of board.py, support.py and schemes.py.
--profile prints the time of every kernel; with several ranks, of those on the first device.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import fnmatch
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

TABLE = Path(__file__).with_name("results_h200.csv")
PAGE = Path(__file__).parents[1] / "docs/develop/cuda-speed.md"
MARKS = "<!-- begin: benchmarks/cuda.py --merge -->\n", "<!-- end -->\n"
FIELDS = ["device", "date", "commit", "command", "row", "value", "unit", "must", "aim"]
BUDGET, LENGTH, SEQUENCES = 8192, 8192 + 128, 256  # tokens a step, longest sequence, sequences at a time
MATMUL = 8192
PEAK_BYTES = 8 << 30
EXACTNESS_ROWS = (1, 32, 128, 256, 1024, 8192)
BLOCK = 16


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, all bfloat16 but for weights that are quantised at load."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool
    head_dim: int = 128
    quantization: str | None = field(default=None, kw_only=True)
    gguf: str | None = field(default=None, kw_only=True)  # the type of the matrices in a GGUF file, which is written first
    kv_dtype: str = field(default="auto", kw_only=True)

    def write(self, folder: Path) -> Path:
        """Writes what `LLM` loads to a new folder: a configuration, or a GGUF file with random weights."""
        if self.gguf is None:
            (folder / "config.json").write_text(json.dumps(self.config()))
            return folder
        import random_gguf

        sizes = {key: getattr(self, key) for key in random_gguf.SHAPE}
        return random_gguf.write(folder / f"{self.gguf}.gguf", self.gguf, shape=sizes, is_tied=self.tied)

    def config(self) -> dict[str, object]:
        """config.json."""
        return {
            "architectures": [f"{self.family}ForCausalLM"], "model_type": self.family.lower(), "torch_dtype": "bfloat16",
            "num_hidden_layers": self.layers, "hidden_size": self.hidden, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "intermediate_size": self.ffn,
            "vocab_size": self.vocab, "tie_word_embeddings": self.tied, "max_position_embeddings": 16384,
            "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 500000.0, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip

    @property
    def linear_weights(self) -> int:
        """Weights of the layers' linears."""
        heads = (self.heads + 2 * self.kv_heads) * self.head_dim
        return self.layers * self.hidden * (heads + self.heads * self.head_dim + 3 * self.ffn)

    def read_weights(self, rows: float) -> float:
        """Weights of the linears that are read for this number of rows."""
        return self.linear_weights

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def attention_layers(self) -> int:
        return self.layers

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one position."""
        return self.attention_layers * self.kv_heads * self.head_dim * 2 * 2

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one sequence."""
        return 0


@dataclass(frozen=True)
class Plamo2(Shape):
    """PLaMo 2: every other layer has a recurrence instead of attention, with heads of the same size."""

    mamba_heads: int = 32
    state: int = 64

    def config(self) -> dict[str, object]:
        own = {
            "model_type": "plamo2", "hidden_size_per_head": self.head_dim, "mamba_num_heads": self.mamba_heads,
            "mamba_d_state": self.state, "mamba_d_conv": 4, "mamba_step": 2, "attention_window_size": 2048,
        }  # fmt: skip
        return {k: v for k, v in super().config().items() if k not in ("head_dim", "hidden_act", "rope_theta")} | own

    @property
    def attention_layers(self) -> int:
        return self.layers // 2

    @property
    def linear_weights(self) -> int:
        width, rank = self.mamba_heads * self.head_dim, max(64, self.hidden // 16)
        mamba = 3 * width * self.hidden + width * (rank + 2 * self.state) + rank * self.mamba_heads
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        recurrent = self.layers - self.attention_layers
        return recurrent * mamba + self.attention_layers * attention + 3 * self.layers * self.hidden * self.ffn

    @property
    def state_bytes(self) -> int:
        return (self.layers - self.attention_layers) * self.mamba_heads * self.head_dim * (self.state + 3) * 4


@dataclass(frozen=True)
class Mixture(Shape):
    """Qwen3-MoE: `chosen` of `experts` experts of width ffn; linear_weights counts the weights that multiply one row."""

    experts: int = 128
    chosen: int = 8

    def config(self) -> dict[str, object]:
        return super().config() | {
            "model_type": "qwen3_moe", "num_experts": self.experts, "num_experts_per_tok": self.chosen,
            "moe_intermediate_size": self.ffn, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip

    @property
    def linear_weights(self) -> int:
        heads = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * self.hidden * (heads + self.experts + 3 * self.ffn * self.chosen)

    def read_weights(self, rows: float) -> float:
        """Including the experts that random rows choose."""
        wanted = self.experts * (1 - (1 - self.chosen / self.experts) ** rows)
        return self.linear_weights + 3 * self.layers * self.hidden * self.ffn * (wanted - self.chosen)


@dataclass(frozen=True)
class GptOss(Mixture):
    """gpt-oss: experts in MXFP4. Every other layer has a window; the bounds ignore these layers' cache."""

    def config(self) -> dict[str, object]:
        own = {
            "model_type": "gpt_oss", "num_local_experts": self.experts, "num_experts_per_tok": self.chosen,
            "intermediate_size": self.ffn, "sliding_window": 128, "attention_bias": True, "swiglu_limit": 7.0,
            "quantization_config": {"quant_method": "mxfp4"},
        }  # fmt: skip
        return {k: v for k, v in Shape.config(self).items() if k not in ("hidden_act", "rope_theta")} | own

    @property
    def attention_layers(self) -> int:
        return self.layers // 2

    def read_weights(self, rows: float) -> float:
        """The number of two-byte weights that take as long to read as these weights."""
        experts = self.layers * 3 * self.hidden * self.ffn
        dense = self.linear_weights - experts * self.chosen
        return dense + 17 / 64 * (super().read_weights(rows) - dense)


MODELS = {
    "8b": Shape("Llama", 32, 4096, 32, 8, 14336, 128256, False),
    "8b-fp8": Shape("Llama", 32, 4096, 32, 8, 14336, 128256, False, quantization="fp8"),
    "8b-int8": Shape("Llama", 32, 4096, 32, 8, 14336, 128256, False, quantization="int8"),
    "8b-int4": Shape("Llama", 32, 4096, 32, 8, 14336, 128256, False, quantization="int4"),
    "8b-q8_0": Shape("Qwen3", 32, 4096, 32, 8, 14336, 128256, False, gguf="q8_0"),
    "8b-q4_k": Shape("Qwen3", 32, 4096, 32, 8, 14336, 128256, False, gguf="q4_k"),
    "8b-kv8": Shape("Llama", 32, 4096, 32, 8, 14336, 128256, False, kv_dtype="fp8"),
    "70b": Shape("Llama", 80, 8192, 64, 8, 28672, 128256, False),  # benchmarks/parallel.py
    "qwen8b": Shape("Qwen3", 36, 4096, 32, 8, 12288, 151936, False),
    "qwen06b": Shape("Qwen3", 28, 1024, 16, 8, 3072, 151936, True),
    "qwen30b": Mixture("Qwen3Moe", 48, 2048, 32, 4, 768, 151936, False),
    "qwen235b": Mixture("Qwen3Moe", 94, 4096, 64, 4, 1536, 151936, False),  # benchmarks/parallel.py
    "qwen30b-fp8": Mixture("Qwen3Moe", 48, 2048, 32, 4, 768, 151936, False, quantization="fp8"),
    "gptoss20b": GptOss("GptOss", 24, 2880, 64, 8, 2880, 201088, False, 64, experts=32, chosen=4),
    "plamo2": Plamo2("Plamo2", 16, 2048, 16, 1, 8192, 100000, True),
}


@dataclass(frozen=True)
class Row:
    """One line of the table. `job` takes the engine and gives the value; `floor` takes shape and ceilings."""

    unit: str
    must: float | None = None
    aim: float | None = None
    vllm: str = ""
    job: Callable[[Engine], float] | None = None
    floor: Callable[[Shape, Ceilings], float] | None = None

    @property
    def is_long(self) -> bool:
        """True if the row takes seconds."""
        return self.unit == "s"

    @property
    def rises(self) -> bool:
        """True if more is better."""
        return self.unit.endswith("/s")


@dataclass
class Ceilings:
    """The machine's ceilings: bytes and operations a second."""

    read: float
    copy: float
    matmul: float

    def step(self, shape: Shape, batch: int, context: float) -> float:
        """Seconds that a decode step needs at least."""
        read, multiplied = shape.read_weights(batch) + shape.head_weights, shape.linear_weights + shape.head_weights
        linears = max(2 * read / self.read, 2 * multiplied * batch / self.matmul)
        return linears + batch * (context * shape.kv_bytes / self.read + 2 * shape.state_bytes / self.copy)

    def prefill(self, shape: Shape, n: int, length: int) -> float:
        """Seconds that n prompts need at least; only their last rows need logits."""
        attention = 2 * shape.attention_layers * shape.heads * shape.head_dim * length * length
        operations = n * (2 * shape.linear_weights * length + attention + 2 * shape.head_weights)
        return max(operations / self.matmul, 2 * (shape.read_weights(n * length) + shape.head_weights) / self.read)


class Engine:
    """llmpy on one of the models."""

    new_tokens = 256  # steps that a row of steps measures

    def __init__(self, name: str, layers: int = 0, eager: bool = False, **options: Any) -> None:
        from llmpy import LLM

        shape = MODELS[name]
        self.shape, self.seeds = replace(shape, layers=layers or shape.layers), itertools.count(1)
        self.llm = LLM(
            self.shape.write(Path(tempfile.mkdtemp(prefix=f"llmpy-{name}-"))),
            load_format="auto" if shape.gguf else "dummy",
            skip_tokenizer_init=True,
            device="cuda:0",
            max_model_len=LENGTH,
            max_num_seqs=SEQUENCES,
            max_num_batched_tokens=BUDGET,
            enforce_eager=eager,
            quantization=shape.quantization,
            kv_cache_dtype=shape.kv_dtype,
            **options,
        )
        self.host_us: dict[int, list[float]] = defaultdict(list)

    def prompts(self, n: int, length: int) -> list[list[int]]:
        """New prompts each time."""
        return np.random.default_rng(next(self.seeds)).integers(10, 100_000, (n, length)).tolist()

    def run(self, prompts: list[list[int]], new_tokens: int, **sampling: Any) -> float:
        """Seconds of one call of generate()."""
        params = {"temperature": 0.0, "max_tokens": new_tokens, "ignore_eos": True, "use_tqdm": False, **sampling}
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, **params)
        seconds = time.perf_counter() - start
        assert all(len(sample.token_ids) == new_tokens for output in outputs for sample in output.outputs)
        return seconds

    def step(self, batch: int, new_tokens: int = 0) -> float:
        before = self.llm.stats().num_steps
        self.run(self.prompts(batch, 128), new_tokens or self.new_tokens)
        full = [s for s in self.llm.step_log(4096) if s.number > before and s.decode_rows == s.rows == batch]
        self.host_us[batch].append(statistics.median(s.host_us for s in full))
        return 1e3 * (full[-1].start - full[0].start) / (full[-1].number - full[0].number)

    def host(self, batch: int) -> float:
        if not self.host_us[batch]:
            self.step(batch, 64)
        return self.host_us[batch].pop()

    def first(self, length: int) -> float:
        """The median of a few calls, because each is short."""
        return 1e3 * statistics.median(self.run(self.prompts(1, length), 1) for _ in range(3 if length > 1024 else 7))

    def cached(self) -> float:
        prompt = self.prompts(1, 8192)
        self.run(prompt, 1)
        return 1e3 * statistics.median(self.run(prompt, 1) for _ in range(5))

    def prefill(self, n: int, length: int) -> float:
        return n * length / self.run(self.prompts(n, length), 1)

    def samples(self) -> float:
        return self.run(self.prompts(32, 512), 512, temperature=1.0, n=8, logprobs=0)

    def warm_up(self) -> None:
        for batch, length in ((1, 16), (SEQUENCES, 128), (1, 8192)):
            self.run(self.prompts(batch, length), 4)

    def close(self) -> None:
        self.llm.close()


def step_row(batch: int, must: float | None = None, aim: float | None = None, vllm: str = "") -> Row:
    return Row("ms", must, aim, vllm, lambda e: e.step(batch), lambda s, c: 1e3 * c.step(s, batch, 256))


def first_row(length: int, must: float | None = None, aim: float | None = None, vllm: str = "") -> Row:
    return Row("ms", must, aim, vllm, lambda e: e.first(length), lambda s, c: 1e3 * c.prefill(s, 1, length))


def prefill_row(must: float, aim: float, vllm: str) -> Row:
    return Row("tok/s", must, aim, vllm, lambda e: e.prefill(32, 2048), lambda s, c: 65536 / c.prefill(s, 32, 2048))


def quantised_rows(name: str, goals: dict[str, tuple[float | None, float | None, str]]) -> dict[str, Row]:
    """Rows of a model with quantised weights or pages, which have no floor: must, aim and vLLM by kind and size."""

    def row_of(kind: str, goal: tuple[float | None, float | None, str]) -> Row:
        what, _, size = kind.partition(".")
        if what == "prefill":
            return Row("tok/s", *goal, lambda e: e.prefill(32, 2048))
        if what == "1024x256":
            return Row("s", *goal, lambda e: e.run(e.prompts(256, 1024), 1024))
        return Row("ms", *goal, lambda e: getattr(e, what)(int(size)))

    return {f"{name}.{kind}": row_of(kind, goal) for kind, goal in goals.items()}


def whole_row(must: float, aim: float, vllm: str) -> Row:
    def floor(s: Shape, c: Ceilings) -> float:
        return c.prefill(s, 256, 1024) + 1023 * c.step(s, 256, 1536)

    return Row("s", must, aim, vllm, lambda e: e.run(e.prompts(256, 1024), 1024), floor)


ROWS: dict[str, Row] = {
    "machine.read": Row("GB/s"),
    "machine.copy": Row("GB/s"),
    "machine.matmul": Row("TFLOP/s"),
    "import": Row("s", 0.1, 0.05, "12"),
    "start": Row("s", 5, 2, "50 (66)"),
    "8b.step.1": step_row(1, 3.5, 3.45, "5.04 (17.5)"),
    "8b.step.32": step_row(32, 4.4, 4.1, "5.57"),
    "8b.step.128": step_row(128, 7.2, 6.5, "7.41"),
    "8b.step.256": step_row(256, 9.4, 8.6, "11.24"),
    "8b.host.1": Row("us", 50, 30, "", lambda e: e.host(1)),
    "8b.host.256": Row("us", 150, 80, "", lambda e: e.host(256)),
    "8b.first.16": first_row(16, 5.5, 4.4, "8.3"),
    "8b.first.128": first_row(128, 6.0, 4.7, "9.5 (14.6)"),
    "8b.first.1024": first_row(1024, 26, 23, "27.7"),
    "8b.first.8192": first_row(8192, 203, 190, "212"),
    "8b.first.cached": Row(
        "ms", 7, 5, "12.2", lambda e: e.cached(), lambda s, c: 1e3 * c.step(s, 1, 8192) - 1e3 * c.step(s, 1, 0) +
        1e3 * c.prefill(s, 1, BLOCK)
    ),
    "8b.prefill": prefill_row(46_000, 49_000, "42200"),
    "8b.n8": Row(
        "s", 6.6, 6.3, "7.75", lambda e: e.samples(), lambda s, c: c.prefill(s, 32, 512) + 511 * c.step(s, 256, 768)
    ),
    "8b.1024x256": whole_row(25, 24, "28.1 (33.0)"),
    **quantised_rows(
        "8b-fp8",
        {
            "step.1": (2.1, 1.95, "3.49"), "step.32": (3.3, 3.0, "4.57"), "step.128": (4.8, 4.4, "5.91"),
            "step.256": (8.3, 7.7, "9.36"), "first.128": (4.5, 4.0, "12.2"), "first.1024": (19, 16, "30.8"),
            "first.8192": (150, 130, "151"), "prefill": (64_000, 75_000, "63200"), "1024x256": (22.5, 20.5, "23.9"),
        },
    ),
    **quantised_rows(
        "8b-int8",
        {
            "step.1": (2.1, 2.0, ""), "step.32": (3.2, 3.0, ""), "step.128": (4.7, 4.5, ""), "step.256": (8.2, 7.9, ""),
            "prefill": (63_000, 80_000, ""),
        },
    ),
    **quantised_rows(
        "8b-int4",
        {
            "step.1": (1.8, 1.5, "3.80"), "step.32": (4.3, 3.6, "4.48"), "step.256": (10.6, 9.9, "10.75"),
            "prefill": (38_000, 46_000, "46100"),
        },
    ),
    **quantised_rows("8b-q8_0", {"step.1": (2.5, 2.2, ""), "step.32": (4.9, 4.2, "")}),
    **quantised_rows("8b-q4_k", {"step.1": (2.2, 1.8, ""), "step.32": (5.3, 4.3, "")}),
    **quantised_rows("8b-kv8", {"step.256": (None, None, ""), "first.8192": (None, None, ""), "1024x256": (None, None, "")}),
    "qwen8b.step.1": step_row(1, 4.2, 3.8, "5.13"),
    "qwen8b.1024x256": whole_row(29.5, 26, "29.8"),
    "qwen06b.step.1": step_row(1, 0.46, 0.40, "1.59"),
    "qwen06b.step.32": step_row(32, 0.80, 0.65, "1.80"),
    "qwen06b.step.256": step_row(256, 3.0, 2.7, "4.60"),
    "qwen30b.step.1": step_row(1, 1.8, 1.65, "4.10"),
    "qwen30b.step.8": step_row(8, 6.6, 6.3, "9.1"),
    "qwen30b.step.32": step_row(32, 12.4, 12.0, "11.0"),
    "qwen30b.step.256": step_row(256, 17.5, 16.5, "21.6"),
    "qwen30b.first.128": first_row(128),
    "qwen30b.first.1024": first_row(1024, 20, 17, "75"),
    "qwen30b.first.8192": first_row(8192),
    "qwen30b.prefill": prefill_row(85_000, 100_000, "68900"),
    **quantised_rows(
        "qwen30b-fp8", {"step.1": (1.5, 1.3, ""), "step.32": (8, 7.2, ""), "step.256": (13, 11.5, "")}
    ),
    "gptoss20b.step.1": step_row(1, 1.15, 1.05, "2.99"),
    "gptoss20b.step.8": step_row(8),
    "gptoss20b.step.32": step_row(32, 2.85, 2.8, "9.1"),
    "gptoss20b.step.256": step_row(256, 5.6, 4.8, "13.4"),
    **{f"gptoss20b.first.{length}": first_row(length) for length in (128, 1024, 8192)},
    "gptoss20b.prefill": prefill_row(90_000, 105_000, "76800"),
    "plamo2.step.1": step_row(1, 0.75, 0.70, "1.70"),
    "plamo2.step.32": step_row(32, 1.8, 1.3, "2.14"),
    "plamo2.step.256": step_row(256, 3.0, 2.7, "4.87"),
    "plamo2.first.128": first_row(128, 6, 3, "14.7"),
    "plamo2.first.8192": first_row(8192, 40, 34),
    "plamo2.1024x256": whole_row(4.6, 4.2, "6.31"),
    **{f"exactness.{rows}": Row("x", 1.10, 1.03, "(1.17 to 3.5)") for rows in EXACTNESS_ROWS},
}  # fmt: skip


class Report:
    """Prints and writes each row as soon as it is measured."""

    def __init__(self, out: Path | None, commit: str, command: str, is_whole: bool) -> None:
        from llmpy import devices

        self.path, self.is_whole = out / "results.csv" if out else None, is_whole
        date = time.strftime("%Y-%m-%d")
        self.known = {"device": devices()[1]["name"], "date": date, "commit": commit, "command": command}
        self.lines = read_table(self.path) if self.path else []
        print(f"{self.known['device']}, {date}, commit {commit or 'unknown'}")
        titles = f"{'row':<18}{'measured':>11} {'unit':<8}{'must':>8}{'aim':>8}  {'vLLM (batch-invariant)':<23}"
        print(f"{titles}{'floor':>9}{'share':>7}")

    def add(self, name: str, values: list[float], floor: float | None = None) -> None:
        row, value = ROWS[name], statistics.median(values)
        share = "" if not floor else f"{100 * (value / floor if row.rises else floor / value):.0f} %"
        verdict = ""
        if self.is_whole and row.must is not None and row.aim is not None:
            reaches = [value >= goal if row.rises else value <= goal for goal in (row.must, row.aim)]
            verdict = "aim" if reaches[1] else "must" if reaches[0] else "SHORT"
        spread = f"{min(values):.4g}..{max(values):.4g} of {len(values)}"
        print(
            f"{name:<18}{value:>11.4g} {row.unit:<8}{row.must or '':>8}{row.aim or '':>8}  {row.vllm:<23}"
            f"{f'{floor:.4g}' if floor else '':>9}{share:>7}  {verdict:<6} {spread}",
            flush=True,
        )
        line = {"row": name, "value": f"{value:.5g}", "unit": row.unit, "must": row.must or "", "aim": row.aim or ""}
        self.lines.append(self.known | line)
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_table(self.path, self.lines)


def read_table(path: Path) -> list[dict[str, object]]:
    """[] without a file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [dict(line) for line in csv.DictReader(file)]


def write_table(path: Path, lines: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def words_of(arguments: list[str]) -> list[str]:
    """The arguments of a command that change what it measures."""
    words = arguments[1:]
    return [w for w, before in zip(words, ["", *words], strict=False) if not {w, before} & {"--out", "--commit"}]


def commit_here() -> str:
    """Git's HEAD, if there is one."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=TABLE.parent)
    return git.stdout.strip()


def add_lines(out: Path | None, commit: str, command: str, lines: list[dict[str, object]]) -> None:
    """Adds lines of row, value, unit, must and aim to results.csv in `out`, for --merge; without `out` does nothing."""
    from llmpy import devices

    if not out:
        return
    known = {"device": devices()[1]["name"], "date": time.strftime("%Y-%m-%d"), "commit": commit or commit_here()}
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.csv"
    write_table(path, read_table(path) + [known | {"command": command, "must": "", "aim": ""} | line for line in lines])


def merge_lines(paths: list[Path]) -> list[dict[str, object]]:
    """Adds results to the table: the newer run of a row replaces the older one of the same commit."""
    lines: dict[tuple[object, object], dict[str, object]] = {}
    for line in itertools.chain(*map(read_table, [TABLE, *paths])):
        key = line["commit"], line["row"]
        lines.pop(key, None)
        lines[key] = line
    write_table(TABLE, list(lines.values()))
    return list(lines.values())


def merge(paths: list[Path]) -> None:
    """Adds results to the table and renews the pages made from it; results of rl.py and gather.py have other pages."""
    lines = merge_lines(paths)
    PAGE.write_text(page(PAGE.read_text(), lines))
    for script in ("board.py", "support.py", "schemes.py"):
        subprocess.run([sys.executable, TABLE.with_name(script)], check=True)
    print(f"{TABLE}: {len(lines)} rows; {PAGE}")


def page(text: str, lines: list[dict[str, object]]) -> str:
    """The page with the last result of every row in its table."""
    on_page = [line for line in lines if not str(line["command"]).startswith(("benchmarks/rl.py", "benchmarks/gather.py"))]
    latest = {str(line["row"]): line for line in on_page}
    table = "| row | measured | must | aim | vLLM (batch-invariant) | commit | command |\n|---|---|---|---|---|---|---|\n"
    for name, line in sorted(latest.items(), key=lambda item: list(ROWS).index(item[0]) if item[0] in ROWS else -1):
        row = ROWS.get(name, Row(str(line["unit"]), *(float(str(line[goal] or 0)) for goal in ("must", "aim"))))
        goals = " | ".join(f"{goal:g}" if goal else "" for goal in (row.must, row.aim))
        table += f"| {name} | {line['value']} {line['unit']} | {goals} | {row.vllm} | {line['commit']} | {line['command']} |\n"
    before, _, rest = text.partition(MARKS[0])
    return before + MARKS[0] + "\n" + table + "\n" + MARKS[1] + rest.partition(MARKS[1])[2]


def in_fresh_process(*arguments: str) -> dict[str, float]:
    """Runs this script and returns the JSON of its last line."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_machine() -> dict[str, float]:
    """Read and copy bandwidth of a plain kernel, and cuBLAS' bf16 matmul of random data: the best of a few runs."""
    import torch

    library = Path(tempfile.mkdtemp()) / "peaks.so"
    nvcc = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin/nvcc"
    source = str(Path(__file__).with_name("peaks.cu"))
    subprocess.run([nvcc, "-O3", "-arch=native", "-shared", "-Xcompiler", "-fPIC", source, "-o", library], check=True)
    peaks = ctypes.CDLL(str(library))
    peaks.peak_read.restype = peaks.peak_copy.restype = ctypes.c_double
    a, b = (torch.randn(MATMUL, MATMUL, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.matmul(a, b)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    size = ctypes.c_size_t(PEAK_BYTES)
    rates = {"read": peaks.peak_read(size, 12), "copy": peaks.peak_copy(size, 12)}
    return rates | {"matmul": 2 * MATMUL**3 / 1e9 / statistics.median(times)}


def measure_start() -> dict[str, float]:
    """Seconds of the import, in an otherwise empty process, and of the constructor."""
    code = "import time; start = time.perf_counter(); import llmpy; print(time.perf_counter() - start)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    begin = time.perf_counter()
    engine = Engine("8b")
    ready = time.perf_counter() - begin
    engine.close()
    return {"import": float(done.stdout), "start": ready}


def measure_exactness() -> dict[str, float]:
    """Our linears' time over cuBLASLt's."""
    import cuda_linear

    from llmpy import hardware

    totals = cuda_linear.measure(["8b"], list(EXACTNESS_ROWS), True, hardware.cublaslt_library(), [])["8b"]
    return {f"exactness.{rows}": ours / theirs for rows, (ours, theirs) in totals.items()}


def measure_model(name: str, rows: list[str], args: argparse.Namespace, ceilings: Ceilings | None, report: Report) -> None:
    """All rows of one model, the short ones in turns, then the long ones; the engine is made once."""
    engine = Engine(name, args.layers, args.eager)
    engine.warm_up()
    samples: dict[str, list[float]] = defaultdict(list)
    for is_long, rounds in ((False, args.rounds), (True, args.long_rounds)):
        turn = [row for row in rows if ROWS[row].is_long == is_long]
        for _ in range(rounds):
            for row in turn:
                job = ROWS[row].job
                if job and (not samples[row] or time.perf_counter() - args.begun < args.limit):
                    samples[row].append(job(engine))
        for row in turn:
            floor = ROWS[row].floor
            report.add(row, samples[row], floor(engine.shape, ceilings) if floor and ceilings else None)
    engine.close()


MEASURES = {"machine": measure_machine, "start": measure_start, "exactness": measure_exactness}


def measure(wanted: list[str], args: argparse.Namespace) -> None:
    machine = {} if args.quick else in_fresh_process("--measure", "machine")
    ceilings = None if args.quick else Ceilings(1e9 * machine["read"], 1e9 * machine["copy"], 1e12 * machine["matmul"])
    report = Report(args.out, args.commit, " ".join(["benchmarks/cuda.py", *words_of(sys.argv)]), not args.layers)
    for name, value in machine.items():
        report.add(f"machine.{name}", [value])
    starts = [row for row in ("import", "start") if row in wanted]
    if starts:
        found = [in_fresh_process("--measure", "start") for _ in range(args.rounds)]
        for row in starts:
            report.add(row, [one[row] for one in found])
    exactness = [row for row in wanted if row.startswith("exactness.")]
    if exactness:
        ratios = in_fresh_process("--measure", "exactness")
        for row in exactness:
            report.add(row, [ratios[row]])
    for name in MODELS:
        rows = [row for row in wanted if row.startswith(name + ".")]
        if rows:
            measure_model(name, rows, args, ceilings, report)
    print(f"{time.perf_counter() - args.begun:.0f} s in all")


def workload(engine: Engine, row: str) -> Callable[[], None]:
    """One step of the row's work ("step.32"), or one prefill; all earlier work is already done."""
    kind, _, size = row.partition(".")
    if kind in ("step", "host", "1024x256", "n8"):
        batch, length = (int(size), 256) if size else (256, 1024)
        for prompt in engine.prompts(batch, length):
            engine.llm.add_request(prompt, temperature=0.0, max_tokens=64, ignore_eos=True)
        while (last := engine.llm.step_log(1)) == [] or last[-1].decode_rows != batch:
            engine.llm.step()
        return lambda: (engine.llm.step(), None)[1]
    if size == "cached":
        cached = engine.prompts(1, 8192)
        engine.run(cached, 1)
        return lambda: (engine.run(cached, 1), None)[1]
    n, length = (4, 2048) if kind == "prefill" else (1, int(size))
    return lambda: (engine.run(engine.prompts(n, length), 1), None)[1]


def profile(rows: list[str], args: argparse.Namespace) -> None:
    """Kernel times of the rows' steps; an engine for each model."""
    import torch

    torch.cuda.init()
    for name, of_model in itertools.groupby(rows, lambda row: row.partition(".")[0]):
        if name not in MODELS:
            raise SystemExit(f"{name}: wanted rows of {', '.join(MODELS)}")
        engine = Engine(name, args.layers, args.eager, tensor_parallel_size=args.ranks)
        for row in of_model:
            print(f"\n{row}{', eager' if args.eager else ''}")
            record_steps(engine, row.partition(".")[2])
            engine.llm.abort_request(list(engine.llm._named))
            while engine.llm.has_unfinished_requests():
                engine.llm.step()
        engine.close()


def record_steps(engine: Engine, kind: str, n: int = 8) -> None:
    """Prints where the time of n steps goes. torch's profiler reads CUPTI, which sees all kernels of the process."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    work = workload(engine, kind)
    for _ in range(2):
        work()
    with record(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        begin = time.perf_counter()
        for _ in range(n):
            work()
        seconds = time.perf_counter() - begin
    trace = Path(tempfile.mkdtemp()) / "trace.json"
    recorded.export_chrome_trace(str(trace))
    print_kernels(json.loads(trace.read_text())["traceEvents"], n)
    print(f"{1e6 * seconds / n:.0f} us of wall time a step while recorded")


def short_name(name: str) -> str:
    """A kernel's name without its type and parameters."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("__nv_bfloat16", "bf16")
    depth = 0
    for i, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            name = name[:i]
            break
    return name if len(name) <= 64 else name[:61] + "..."


def print_kernels(events: list[dict[str, Any]], n: int) -> None:
    """Time a step by kernel and grid. Dependent kernels overlap: "alone" counts from the end of everything before."""
    found = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found = [e for e in found if e.get("args", {}).get("device", 0) == 0]
    found.sort(key=lambda e: e["ts"] + e["dur"])
    if not found:
        raise SystemExit("the profiler recorded no kernel")
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    end = found[0]["ts"]
    for event in found:
        args = event.get("args", {})
        size = f"{'x'.join(map(str, args['grid']))} of {args['block'][0]}" if "grid" in args else ""
        total = totals[short_name(event["name"]), size]
        total[0] += 1
        total[1] += event["dur"]
        total[2] += max(0.0, event["ts"] + event["dur"] - max(event["ts"], end))
        end = max(end, event["ts"] + event["dur"])
    busy = sum(total[2] for total in totals.values())
    span = end - min(event["ts"] for event in found)
    print(f"{'kernel':<66}{'grid':<20}{'calls':>8}{'us each':>10}{'us alone':>10}{'a step':>10}{'%':>7}")
    for (name, size), (calls, spent, alone) in sorted(totals.items(), key=lambda item: -item[1][2]):
        print(
            f"{name:<66}{size:<20}{calls / n:>8.1f}{spent / calls:>10.2f}{alone / calls:>10.2f}{alone / n:>10.1f}"
            f"{100 * alone / busy:>7.1f}"
        )
    print(f"a step: busy {busy / n:.1f} us, from the first kernel to the last {span / n:.1f} us, {len(found) / n:.0f} launches")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long-rounds", type=int, default=1, help="of the rows that take seconds")
    parser.add_argument("--limit", type=float, default=520, help="seconds after which no row is measured again")
    parser.add_argument("--out", type=Path, help="directory for results.csv")
    parser.add_argument("--commit", default="", help="what is measured; default: git's HEAD, if there is one")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers, for a try")
    parser.add_argument("--quick", action="store_true", help="do not measure the machine; no shares then")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--profile", nargs="+", metavar="ROW")
    parser.add_argument("--ranks", type=int, default=1, help="with --profile: tensor_parallel_size")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="CSV")
    parser.add_argument("--measure", choices=list(MEASURES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.begun = time.perf_counter()
    if args.merge:
        return merge(args.merge)
    if args.measure:
        return print(json.dumps(MEASURES[args.measure]()))
    if args.profile:
        return profile(args.profile, args)
    args.commit = args.commit or commit_here()
    patterns = args.rows or ["*"]
    wanted = [row for row in ROWS if any(fnmatch.fnmatch(row, pattern) for pattern in patterns)]
    if not wanted:
        raise SystemExit(f"no row is called {patterns}; there are {', '.join(ROWS)}")
    measure(wanted, args)


if __name__ == "__main__":
    main()
