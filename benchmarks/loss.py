"""What quantisation costs the demo model: logprobs and distributions of every scheme against float32 weights.

    python benchmarks/loss.py [SCHEME ...] [--folder DIRECTORY] [--seeds N] [--page]

The demo model's file stores its linears in blocks of Q4_1. The reference is that model off this grid: channels of the residual
stream, of the feed-forward layers and of the values are put in a random order, which changes no output, and each weight of a
linear is moved by a random part of half a step of its block. So no type has blocks or values of its own in the reference.
`--seeds` gives the mean over several such references. `--page` writes the table to `docs/use/quantization.md`.
`tests/e2e/test_loss.py` measures all schemes and compares them with that table.

The model and each reference take 540 MB of a temporary directory, or of --folder, which keeps them.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
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

DEVICE = "cpu:avx2"
"""Instructions that every x86-64 machine of llmpy has, so the bits of a row are the same on all of them."""
LOADED: dict[str, float] = {
    "fp8": 8.25, "int8": 8.25, "q8_0": 8.5, "q5_0": 5.5, "int4_g32": 5, "q4_1": 5, "nf4": 4.5, "q4_0": 4.5, "int4": 4.25,
}  # fmt: skip
"""Values of `quantization`, and bits a weight."""
CACHED: dict[str, dict[str, Any]] = {f"cache {name}": {"kv_cache_dtype": name} for name in ("fp8", "int8")}
GGUF_TYPES = ("BF16", "F16", "Q6_K", "Q5_K", "Q5_1", "Q4_K", "MXFP4", "Q2_K")
ROUNDED = ", INT8 activations"
"""Ends the name of a scheme whose linears round their inputs to INT8."""
ROUNDING = tuple(f"{name}{ROUNDED}" for name in ("int8", "q8_0", "q4_0"))
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


def exact(folder: Path) -> Path:
    """The demo model in float32; an existing file is taken."""
    path = folder / "demo.F32.gguf"
    return path if path.exists() else convert("demo", folder / "part", "gguf-f32").rename(path)


def reference(folder: Path, seed: int = 0) -> Path:
    """The file of a reference; an existing one is taken."""
    path = folder / f"reference-{seed}.F32.gguf"
    if not path.exists():
        made = Path(shutil.copy(exact(folder), folder / "part"))
        leave_grid(made, seed)
        made.rename(path)
    return path


def leave_grid(path: Path, seed: int) -> None:
    """Moves the weights of a float32 file's linears from Q4_1's grid, and mixes its blocks.

    A block of 32 weights has 16 steps. Each weight moves by up to half a step, drawn evenly. Then channels change places.
    """
    import gguf

    reader = gguf.GGUFReader(path, "r+")
    random = np.random.default_rng(21 + seed)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    heads, kv_heads = (int(reader.fields[f"llama.attention.{key}"].contents()) for key in ("head_count", "head_count_kv"))
    channels = random.permutation(len(tensors["output_norm.weight"]))
    for name, data in tensors.items():
        if name.startswith("blk.") and data.ndim == 2:
            blocks = data.reshape(-1, 32)
            steps = (blocks.max(-1, keepdims=True) - blocks.min(-1, keepdims=True)) / 15
            blocks += steps * (random.random(blocks.shape, np.float32) - np.float32(0.5))
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            data[:] = data[channels]
        else:
            data[:] = data[..., channels]
    for prefix in sorted({name.rpartition(".ffn_up")[0] for name in tensors if ".ffn_up" in name}):
        gate, up, down, v, o = (
            tensors[f"{prefix}.{name}.weight"] for name in ("ffn_gate", "ffn_up", "ffn_down", "attn_v", "attn_output")
        )
        inner = random.permutation(len(up))
        gate[:], up[:], down[:] = gate[inner], up[inner], down[:, inner]
        size = len(v) // kv_heads
        inside = [head * size + random.permutation(size) for head in range(kv_heads)]
        v[:] = v[np.concatenate(inside)]
        group = heads // kv_heads
        o[:] = o[:, np.concatenate([inside[h // group] + (h - h // group) * size for h in range(heads)])]


def logprobs(path: Path, **options: Any) -> tuple[np.ndarray, list[int]]:
    """Logprobs of all tokens of the vocabulary behind every token of TEXT, float64 [tokens, vocabulary], and the ids."""
    fixed = {"device": DEVICE, "dtype": "float32", "activation_dtype": "float", "max_model_len": 1024}
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
        have, ids = logprobs(path, **CACHED.get(name, {"quantization": name}), **rounds)
    else:
        written = convert(str(path), path.with_name("scheme.gguf"), f"gguf-{kind.lower()}")
        have, ids = logprobs(written, **rounds)
        written.unlink()
    places = np.arange(len(ids) - 1), ids[1:]
    differences = np.abs(have[places] - wanted[places])
    kl = (np.exp(wanted) * (wanted - have)).sum(-1)
    perplexity = float(np.exp(-have[places].mean()))
    return Loss(float(differences.mean()), float(differences.max()), float(kl.mean()), perplexity)


def measure_all(folder: Path, schemes: Sequence[str] = SCHEMES, n_seeds: int = 1) -> dict[str, Loss]:
    """The losses of schemes.

    Args:
        folder: For the model's files.
        schemes: Some of SCHEMES.
        n_seeds: References; losses are means over them.
    """
    found: dict[str, list[Loss]] = {scheme: [] for scheme in schemes}
    for seed in range(n_seeds):
        path = reference(folder, seed)
        wanted, _ = logprobs(path)
        for scheme in schemes:
            found[scheme].append(measure(path, scheme, wanted))
    return {scheme: Loss(*np.mean([astuple(loss) for loss in losses], 0)) for scheme, losses in found.items()}


def bits_of(scheme: str) -> str:
    """Bits of a weight; those of GGUF's types by the package."""
    import gguf

    name = scheme.removesuffix(ROUNDED)
    if name in LOADED:
        return f"{LOADED[name]:g}"
    if name in CACHED:
        return "32"
    values, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.removeprefix("GGUF ")]]
    return f"{8 * n_bytes / values:.4g}"


def table(losses: Mapping[str, Loss]) -> str:
    """The table in Markdown."""
    head = "| scheme | bits | perplexity | mean difference of a logprob | largest | KL divergence |\n" + 6 * "|---" + "|\n"
    return head + "".join("| " + " | ".join([name, bits_of(name), *loss.cells()]) + " |\n" for name, loss in losses.items())


def page(text: str, losses: Mapping[str, Loss]) -> str:
    """The page with a new table."""
    before, _, rest = text.partition(MARKS[0])
    return before + MARKS[0] + "\n" + table(losses) + "\n" + MARKS[1] + rest.partition(MARKS[1])[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemes", nargs="*", default=SCHEMES, metavar="SCHEME", help=", ".join(SCHEMES))
    parser.add_argument("--folder", type=Path, help="keeps the file of the reference here")
    parser.add_argument("--seeds", type=int, default=1, help="references, default 1")
    parser.add_argument("--page", action="store_true", help="writes the table to the page")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure_all(chosen.folder or Path(scratch), chosen.schemes, chosen.seeds)
    print(table(found), end="")
    if chosen.page:
        PAGE.write_text(page(PAGE.read_text(), found))


if __name__ == "__main__":
    main()
