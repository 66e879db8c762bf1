"""Writes the table of stored types to docs/use/quantization.md: bits, arithmetics of each device, loss and speed.

    python benchmarks/schemes.py

Types and arithmetics come from the tables of the code (dtype.c, the CPU's kernels, types.cuh and units.cuh), losses from the
page's own table (benchmarks/loss.py), speeds from the committed results. A dash stands where nothing was measured.
"""

from __future__ import annotations

import csv
import re
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/use/quantization.md"
MARKS = "<!-- begin: benchmarks/schemes.py -->\n", "<!-- end of the schemes -->\n"
HEAD = ("type", "bits a weight", "CPU", "CUDA", "loss", "CPU, decode, tok/s", "H200, step of 1 / 32 / 256 sequences, ms")
ROUNDED = {"FP8": "fp8", "INT8_G128": "int8"}
"""Types whose products round activations to 8 bits on CUDA, and to what."""
LOSSES = {
    "FP8": "fp8", "INT8_G128": "int8", "INT4_G128": "int4", "INT4_G32": "int4_g32", "NF4": "nf4",
    **{name: name.lower() for name in ("Q8_0", "Q5_0", "Q4_1", "Q4_0")},
}  # fmt: skip
"""The rows of the table of losses; those of other types are GGUF's names."""
CPU_NAMES = {"F32": "f32", "BF16": "bf16"}
H200_NAMES = {
    "BF16": "8b", "FP8": "8b-fp8", "INT8_G128": "8b-int8", "INT4_G128": "8b-int4", "Q8_0": "8b-q8_0", "Q4_K": "8b-q4_k",
}  # fmt: skip


def bits() -> dict[str, str]:
    """Bits a weight of each type."""
    rows = re.findall(r'\[DTYPE_(\w+)\] = \{\{"\w+", (\d+), (\d+)\}', (ROOT / "csrc/base/dtype.c").read_text())
    return {name: f"{8 * int(n_bytes) / int(n_values):.4g}" for name, n_values, n_bytes in rows}


def in_units() -> set[str]:
    """The types that tensor cores of CUDA multiply exactly."""
    return {*re.findall(r"^ *\{DTYPE_(\w+), +DTYPE_\w+,", (ROOT / "kernels/cuda/core/units.cuh").read_text(), re.MULTILINE)}


def on_cuda(name: str, support: str) -> str:
    """The arithmetics of a type on CUDA, the default with bfloat16 first."""
    if support == "no":
        return "no"
    if name in ("F32", "F16", "BF16"):
        return "float" if name == "F32" else "float, tensor cores"
    best = ROUNDED.get(name) or ("exact, tensor cores" if name in in_units() else "")
    return f"{best}; float" if best else "float, experts on tensor cores" if "packed" in support else "float"


def losses(page: str) -> dict[str, str]:
    """Mean differences of a logprob from the table of losses."""
    found = page.partition("<!-- begin: benchmarks/loss.py --page -->")[2].partition("<!-- end -->")[0]
    return dict(re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \| ([^|]+) \|", found, re.MULTILINE))


def cpu_speeds() -> dict[str, str]:
    """Tokens a second of one request on the CPU."""
    text = (ROOT / "benchmarks/results_cpu_zen5.csv").read_text().splitlines()
    rows = csv.DictReader(line for line in text if not line.startswith("#"))
    return {row["type"]: row["llmpy tok/s"] for row in rows if row["job"] == "decode 1"}


def h200_speeds() -> dict[str, str]:
    """The measures on the H200; the newest wins."""
    with (ROOT / "benchmarks/results_h200.csv").open() as file:
        return {row[4]: row[5] for row in csv.reader(file) if len(row) > 5}


def rows(page: str) -> list[list[str]]:
    """The table's rows."""
    support: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks/support.py"))
    widths, of_scheme, cpu, h200, found = bits(), losses(page), cpu_speeds(), h200_speeds(), []
    for name, _, avx512, cuda in support["weight_types"]():
        loss = of_scheme.get(LOSSES.get(name, f"GGUF {name}"), "-")
        speeds = [h200.get(f"{H200_NAMES.get(name)}.step.{n}") for n in (1, 32, 256)]
        h200_cell = " / ".join(f"{float(each):.3g}" if each else "-" for each in speeds) if any(speeds) else "-"
        tokens = cpu.get(CPU_NAMES.get(name, name.lower()), "-")
        found.append([name, widths[name], avx512, on_cuda(name, cuda), loss, tokens, h200_cell])
    return found


def page(text: str) -> str:
    """The page with a new table."""
    lines = [HEAD, ("---",) * len(HEAD), *rows(text)]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("| --- ", "|---").replace("|--- |", "|---|")
    before, _, rest = text.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n{table}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
