"""Writes docs/results/support.html: what runs on which device, from the tables of the code, and what was last seen there.

    python benchmarks/support.py

Families: every operation of the programs of their released models (tests/models/released.json), against the entries of each
backend's table. Weight types: the tables of the CPU's kernels and of kernels/cuda. Seen: the newest committed result of each
feature on each device, with the commit. The page is one file without scripts; it changes only if one of these changes.
"""

from __future__ import annotations

import csv
import html
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/results/support.html"
BACKENDS = {"cpu": ROOT / "kernels/cpu/backend_cpu.c", "cuda": ROOT / "kernels/cuda/core/backend_cuda.cu"}
GROUPS = ("ENTRY", "HOST_ENTRY", "RANK_ENTRY", "OPTION_ENTRY", "OWN_ENTRY")

STYLE = """
body{font:14px/1.4 system-ui,sans-serif;margin:2em auto;max-width:78em;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;margin:0 0 2em}th,td{padding:.15em .7em;text-align:left;border-bottom:1px solid #e4e4e4}
th{font-weight:600;color:#555}.no{color:#b00020;font-weight:600}code{font-family:ui-monospace,monospace}
@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}th,td{border-color:#333}th{color:#aaa}.no{color:#ff6b7f}}
""".strip()

FEATURES = {
    "benchmarks/cuda.py": "generation: steps, prompts, start",
    "benchmarks/h200.sh test": "every test of kernels, engine and models",
    "compute-sanitizer|h200.sh sanitize": "every kernel under compute-sanitizer",
    "benchmarks/parallel.py": "ranks: tensor and expert parallelism",
    "benchmarks/gather.py|test_gather_cuda.py": "gathers of ranks",
    "tests/models/test_ranks.py": "families on ranks",
    "tests/engine/test_exactness.py": "the same bits in any batch",
    "benchmarks/adapters_cuda.py": "adapters",
    "benchmarks/tiers.py": "the cache in host memory",
    "benchmarks/rl.py": "weight updates from a trainer",
    "benchmarks/async_engine.py": "AsyncEngine",
    "benchmarks/cuda_linear.py": "linears of quantised types",
    "benchmarks/cuda_experts.py": "mixtures of experts of quantised types",
    "benchmarks/cpu.py": "generation: steps, prompts",
}
"""Words of a result's command -> the feature that it showed."""


@cache
def entries() -> dict[str, tuple[str, str]]:
    """The entries of struct backend that are kernels: group, and what happens without one."""
    text = (ROOT / "kernels/entries.def").read_text()
    found = re.findall(rf"^({'|'.join(GROUPS)})\((\w+)\) *(?:/\* (.*?) \*/)?", text, re.MULTILINE)
    return {name: (group, remark) for group, name, remark in found}


@cache
def operations() -> dict[str, str]:
    """The entry that each operation of programs wants."""
    text = (ROOT / "csrc/program/operations.def").read_text()
    rows = re.findall(r"^OPERATION\(\w+, (\w+), \w+, \w+, \w+, \w+, \w+, \w+, (\w+),", text, re.MULTILINE)
    return dict(rows)


def has(backend: str, entry: str) -> bool:
    """Whether a backend's table fills an entry."""
    text, group = BACKENDS[backend].read_text(), entries().get(entry, ("", ""))[0]
    table = text[text.rindex(".abi = BACKEND_ABI") :]
    before = table[: table.index('entries.def"')]
    return f".{entry} = " in table or f"#define {group}(name)" in before


@cache
def programs() -> dict[str, tuple[list[str], set[str]]]:
    """Family -> the architectures of its released models, and all operations of their programs."""
    from llmpy import models

    script = runpy.run_path(str(ROOT / "docs/models_table.py"))
    titles = {name: script["title"](module) for module, names in script["families"]().items() for name in names}
    found: dict[str, tuple[list[str], set[str]]] = {title: ([], set()) for title in titles.values()}
    for one in json.loads((ROOT / "tests/models/released.json").read_text()).values():
        files: Any = SimpleNamespace(kind="hf", directory="hub", weights=[], config=dict(one["config"]))
        names, ops = found[titles[one["config"]["architectures"][0]]]
        names.append(one["config"]["architectures"][0])
        spec = models.load(files, None).spec
        ops.update(op for part in (spec, *spec.get("towers", {}).values()) for op, _ in part["ops"])
    return found


def families() -> list[list[str]]:
    """Rows: family, its operations beyond Llama's, number of released models, each backend, and shapes that were timed."""
    wanted, timed = operations(), timed_shapes()
    plain = next(ops for names, ops in programs().values() if "LlamaForCausalLM" in names)
    rows = []
    for title, (names, ops) in programs().items():
        row = [title, ", ".join(sorted(ops - plain)) or "-", str(len(names))]
        for backend in BACKENDS:
            lacking = [op for op in sorted(ops) if not has(backend, wanted[op])]
            lacking = [op for op in lacking if not entries()[wanted[op]][1].startswith("composed")]
            row.append("no: " + ", ".join(lacking) if lacking else "yes" if ops else "no released model that compiles")
        rows.append([*row, "; ".join(sorted(one for name in set(names) for one in timed.get(name, []))) or "-"])
    return rows


def timed_shapes() -> dict[str, list[str]]:
    """Architecture -> shapes of full size that results name, with the device and the commit of the newest one."""
    text = (ROOT / "benchmarks/cuda.py").read_text()
    found: dict[str, list[str]] = {}
    for shape, name in re.findall(r'^    "(\w+)": \w+\("(\w+)", \d', text, re.MULTILINE):
        for device in sorted({row["device"] for row in results()}):
            rows = [row for row in results() if row["device"] == device and shape in re.split(r"[ .]", row["row"])]
            if rows:
                newest = sorted(rows, key=lambda row: row["date"])[-1]
                found.setdefault(f"{name}ForCausalLM", []).append(f"{shape} on {device} ({newest['commit']}, {newest['date']})")
    return found


def weight_types() -> list[list[str]]:
    """Rows: type, arithmetics of the CPU's two sets of instructions, and what the CUDA backend has."""
    text = (ROOT / "csrc/base/dtype.h").read_text()
    names = re.findall(r"^    DTYPE_(\w+) = \d+", text, re.MULTILINE)
    table = (ROOT / "kernels/cuda/core/types.cuh").read_text().partition("CUDA_TYPES[] = {")[2].partition("};")[0]
    cuda = dict(re.findall(r"\{DTYPE_(\w+),.*DTYPE_(\w+)\}", table))
    cpu = {isa: cpu_arithmetics(isa) for isa in ("avx2", "avx512")}
    rows = []
    for name in names:
        packed = cuda.get(name)
        there = "no" if packed is None else "yes" if packed == "NONE" else f"yes; packed for {packed.lower()}"
        row = [", ".join(cpu[isa].get(name.lower(), [])) or "no" for isa in cpu] + [there]
        if set(row) != {"no"}:
            rows.append([name, *row])
    return rows


@cache
def cpu_arithmetics(isa: str) -> dict[str, list[str]]:
    """Type -> arithmetics of its linears, from the table of linear_types_*.c behind the preprocessor."""
    command = [*shlex.split(os.environ.get("CC") or "cc"), "-E", "-P", "-mavx2", "-mfma", "-mf16c", f"-DISA={isa}"]
    command += ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni", "-mavx512bf16"] if isa == "avx512" else []
    command.append(str(ROOT / f"kernels/cpu/linear_types_{isa}.c"))
    source = subprocess.run(command, capture_output=True, text=True, check=True)
    table = source.stdout.partition("TYPES[] = {")[2].partition("};")[0]
    found: dict[str, list[str]] = {}
    for name, arithmetic in re.findall(r"&linear_(\w+?)(?:_(float|int8|pairs))?_avx\w+", table):
        kind = {"": "float", "pairs": "bf16"}.get(arithmetic, arithmetic)
        found[name] = sorted({*found.get(name, []), kind})
    return found


@cache
def results() -> tuple[dict[str, str], ...]:
    """All committed results; those of the CPU have no commit."""
    found: list[dict[str, str]] = []
    for path in sorted((ROOT / "benchmarks").glob("results_*.csv")):
        lines = path.read_text().splitlines()
        if lines[0].startswith("#"):
            device, date, command = re.fullmatch(r"# (.*?), \d+ threads, ([\d-]+), (?:python )?(.*)", lines[0]).groups()  # type: ignore[union-attr]
            found.append({"device": device, "date": date, "commit": "", "command": command, "row": "", "unit": ""})
        else:
            found += csv.DictReader(lines)
    return tuple(found)


def seen() -> list[list[str]]:
    """Rows: feature, device, date, commit and command of its newest result without a failure."""
    rows = []
    for words, feature in FEATURES.items():
        for device in sorted({row["device"] for row in results()}):
            good = [row for row in results() if row["device"] == device and re.search(words, row["command"])]
            good = [row for row in good if "failed" not in row["unit"] and not ("error" in row["unit"] and row["value"] != "0")]
            if good:
                newest = sorted(good, key=lambda row: row["date"])[-1]
                rows.append([feature, device, newest["date"], newest["commit"] or "-", newest["command"]])
    return rows


def table(head: Iterable[str], rows: Iterable[list[str]]) -> str:
    """A table; cells that say no are marked."""

    def cell(text: str) -> str:
        return f"<td{' class=no' if re.match('no(:|$)', text) else ''}>{html.escape(text)}</td>"

    lines = ["<tr>" + "".join(f"<th>{html.escape(text)}</th>" for text in head) + "</tr>"]
    lines += ["<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def page() -> str:
    """The whole page."""
    kernels = [
        [name, *("yes" if has(backend, name) else remark or "no" for backend in BACKENDS)]
        for name, (_, remark) in entries().items()
    ]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>llmpy: what runs where</title>",
        f"<style>{STYLE}</style><h1>What runs where</h1>",
        "<p>Made by <code>python benchmarks/support.py</code> from the tables of the code and the committed results. Families",
        "are tested on the CPU on every change; the last table says what a device showed. <a href=board.html>Speeds</a></p>",
        "<h2>Families</h2><p>A family runs on a device whose backend has every operation of its released models.</p>",
        table(["family", "operations beyond Llama's", "released models", *BACKENDS, "timed at full size"], families()),
        "<h2>Weight types</h2><p>The CPU's cells are the activations of its linears: float32, int8 or bfloat16.</p>",
        table(["type", "cpu, AVX2", "cpu, AVX-512", "cuda"], weight_types()),
        "<h2>Operations of the backends</h2><p>Composed: the core computes it from others, or on the host.</p>",
        table(["entry", *BACKENDS], kernels),
        "<h2>Last seen</h2><p>The newest committed result of each feature on each device, without a failure.</p>",
        table(["feature", "device", "date", "commit", "command"], seen()),
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page())
