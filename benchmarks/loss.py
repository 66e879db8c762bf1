"""What quantisation costs the demo model: logprobs and distributions of every scheme against float32 weights.

    python benchmarks/loss.py [SCHEME ...] [--folder DIRECTORY] [--page | --noise]

The demo model's file stores its linears in Q4_1. Their exact values in float32 are the reference; every scheme rounds them.
With `--noise` the reference does not lie on Q4_1's grid: each of its linears' weights is moved by a random part of half a step.
`--page` writes the table to `docs/use/quantization.md`. `tests/e2e/test_loss.py` measures all schemes and compares them with
that table.

The file of the reference takes 540 MB of a temporary directory, or of --folder, which keeps it.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmpy import LLM
from llmpy.convert import convert

PAGE = Path(__file__).parents[1] / "docs/use/quantization.md"
MARKS = "<!-- begin: benchmarks/loss.py --page -->\n", "<!-- end -->\n"
TEXT = """The harbour lies two miles south of the town. In winter the ferry leaves at 7:40 and returns before dark; in summer
there are eleven crossings a day, and a ticket costs $4.50 for adults and $2.25 for children under twelve.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("wanted at least one value")
    return sum(values) / len(values)

Question: Which planet is the largest of the solar system?
Answer: Jupiter. Its mass is about two and a half times that of all other planets together.

Am Abend wird es kalt, und der Wind dreht nach Norden. {"name": "Ada", "born": 1815, "languages": ["English", "French"]}
"""
"""Prose, code, a question, German and JSON."""

GGUF_TYPES = ("BF16", "F16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
LOADED: dict[str, dict[str, Any]] = {name: {"quantization": name} for name in ("fp8", "int8", "int4", "int4_g32")}
CACHED: dict[str, dict[str, Any]] = {f"cache {name}": {"kv_cache_dtype": name} for name in ("fp8", "int8")}
ROUNDED = ", INT8 activations"
"""Ends the name of a scheme whose linears round their inputs to INT8."""
ROUNDING = (f"GGUF Q8_0{ROUNDED}", f"GGUF Q4_0{ROUNDED}")
SCHEMES = (*LOADED, *CACHED, *(f"GGUF {name}" for name in GGUF_TYPES), *ROUNDING)
"""The table's rows: quantisation at load, caches of one byte, GGUF files, and some of these with INT8 activations."""


@dataclass(frozen=True)
class Loss:
    """The loss of one scheme over the tokens of TEXT.

    Attributes:
        mean: Mean |difference| of a token's logprob, in nats.
        largest: The largest of these differences.
        kl: Mean Kullback-Leibler divergence of the next token's distribution from the reference's, in nats.
        perplexity: Of TEXT.
    """

    mean: float
    largest: float
    kl: float
    perplexity: float

    def cells(self) -> list[str]:
        """The numbers of a row: perplexity with four digits, the others with two."""
        return [f"{self.perplexity:.4g}", *(f"{value:.2g}" for value in (self.mean, self.largest, self.kl))]


def reference(folder: Path) -> Path:
    """The demo model in float32; an existing file is taken."""
    path = folder / "demo.F32.gguf"
    return path if path.exists() else convert("demo", folder / "part", "gguf-f32").rename(path)


def add_noise(path: Path) -> None:
    """Moves the weights of a float32 file's linears from Q4_1's grid, where floats of no grid may have lain before rounding.

    A block of 32 weights has 16 steps. Each weight moves by up to half a step, drawn evenly from a fixed seed.
    """
    import gguf

    random = np.random.default_rng(21)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            blocks = tensor.data.reshape(-1, 32)
            steps = (blocks.max(-1, keepdims=True) - blocks.min(-1, keepdims=True)) / 15
            blocks += steps * (random.random(blocks.shape, np.float32) - np.float32(0.5))


def logprobs(path: Path, **options: Any) -> tuple[np.ndarray, list[int]]:
    """Logprobs of all tokens of the vocabulary behind every token of TEXT, float64 [tokens, vocabulary], and the ids."""
    fixed = {"device": "cpu", "dtype": "float32", "activation_dtype": "float", "max_model_len": 1024}
    with LLM(path, **{**fixed, "kv_cache_memory_bytes": "128MiB", **options}) as llm:
        ids = llm.tokenizer.encode(TEXT)
        logits = llm.tap([ids], ["logits"])[0]["logits"].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True)), ids


def measure(path: Path, scheme: str, wanted: np.ndarray) -> Loss:
    """The loss of one scheme.

    Args:
        path: The reference's file.
        scheme: One of SCHEMES.
        wanted: The reference's logprobs.
    """
    name = scheme.removesuffix(ROUNDED)
    kind, rounds = name.removeprefix("GGUF "), {"activation_dtype": "int8"} if name != scheme else {}
    if kind == name:
        have, ids = logprobs(path, **{**LOADED, **CACHED}[name], **rounds)
    else:
        written = convert(str(path), path.with_name("scheme.gguf"), f"gguf-{kind.lower()}")
        have, ids = logprobs(written, **rounds)
        written.unlink()
    places = np.arange(len(ids) - 1), ids[1:]
    differences = np.abs(have[places] - wanted[places])
    kl = (np.exp(wanted) * (wanted - have)).sum(-1)
    perplexity = float(np.exp(-have[places].mean()))
    return Loss(float(differences.mean()), float(differences.max()), float(kl.mean()), perplexity)


def measure_all(folder: Path, schemes: Sequence[str] = SCHEMES, has_noise: bool = False) -> dict[str, Loss]:
    """The losses of schemes.

    Args:
        folder: For the model's files.
        schemes: Some of SCHEMES.
        has_noise: Whether the reference has noise.
    """
    path = reference(folder)
    if has_noise:
        path = Path(shutil.copy(path, folder / "noise.F32.gguf"))
        add_noise(path)
    wanted, _ = logprobs(path)
    return {scheme: measure(path, scheme, wanted) for scheme in schemes}


def table(losses: Mapping[str, Loss]) -> str:
    """The table in Markdown."""
    head = "| scheme | perplexity | mean difference of a logprob | largest | KL divergence |\n|---|---|---|---|---|\n"
    return head + "".join("| " + " | ".join([scheme, *loss.cells()]) + " |\n" for scheme, loss in losses.items())


def page(text: str, losses: Mapping[str, Loss]) -> str:
    """The page with a new table."""
    before, _, rest = text.partition(MARKS[0])
    return before + MARKS[0] + "\n" + table(losses) + "\n" + MARKS[1] + rest.partition(MARKS[1])[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemes", nargs="*", default=SCHEMES, metavar="SCHEME", help=", ".join(SCHEMES))
    parser.add_argument("--folder", type=Path, help="keeps the file of the reference here")
    parser.add_argument("--noise", action="store_true", help="moves the reference from Q4_1's grid")
    parser.add_argument("--page", action="store_true", help="writes the table to the page")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure_all(chosen.folder or Path(scratch), chosen.schemes, chosen.noise)
    print(table(found), end="")
    if chosen.page and not chosen.noise:
        PAGE.write_text(page(PAGE.read_text(), found))


if __name__ == "__main__":
    main()
