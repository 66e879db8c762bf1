"""Decode at batch 1 and 32 and prefill of 512 tokens on the CPU, compared with this machine's ceilings and with llama.cpp.

    python benchmarks/cpu.py [--types bf16,q8_0,q4_0,f32] [--model FILE.gguf] [--rounds 7] [--threads N] [--csv OUT.csv]
    python benchmarks/cpu.py --page

Without --model: Qwen3-0.6B's shape with random weights, one file a type. Greedy, token-id prompts, ignore_eos, prefix caching
off.
Every round measures the ceilings, llmpy and llama.cpp (if `llama_cpp` is installed) one after another; medians are printed.
--page writes the tables of docs/develop/cpu-speed.md from results_cpu_*.csv in this script's folder.
"""

import argparse
import csv
import ctypes
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Protocol

import numpy as np
import random_gguf

DECODE_TOKENS, PROMPT = 24, 16
REST_S = 0.7  # llama.cpp's workers spin for a while after a call, so wait before the next measurement
BUFFER_BYTES = 1 << 30
PAGE = Path(__file__).parents[1] / "docs/develop/cpu-speed.md"
MARKS = "<!-- begin: benchmarks/cpu.py --page -->\n", "<!-- end -->\n"


class Engine(Protocol):
    """An engine of the comparison; its methods return tokens a second."""

    def decode(self, batch: int) -> float: ...
    def prefill(self, length: int) -> float: ...


JOBS = {"decode 1": lambda e: e.decode(1), "decode 32": lambda e: e.decode(32), "prefill 512": lambda e: e.prefill(512)}


def prompt_id(i: int, j: int) -> int:
    """Token j of prompt i."""
    return 100 + (7 * i + 11 * j) % 1000


class Peaks:
    """Read bandwidth (GB/s) and float32 multiply-add peak (GFLOP/s) of this machine."""

    def __init__(self, threads: int) -> None:
        library = Path(tempfile.mkdtemp()) / "peaks.so"
        source = Path(__file__).with_name("peaks.c")
        flags = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
        subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
        self.lib, self.threads = ctypes.CDLL(str(library)), threads
        self.lib.peak_read.restype = self.lib.peak_float.restype = ctypes.c_double
        self.buffer = np.ones(BUFFER_BYTES, np.uint8)

    def read(self) -> float:
        address = self.buffer.ctypes.data_as(ctypes.c_void_p)
        return float(self.lib.peak_read(address, ctypes.c_size_t(BUFFER_BYTES), self.threads))

    def multiply(self) -> float:
        return float(self.lib.peak_float(ctypes.c_long(1_000_000), self.threads))


class Ours:
    """llmpy on a GGUF file."""

    def __init__(self, path: Path, threads: int) -> None:
        os.environ["LLMPY_NUM_THREADS"] = str(threads)
        from llmpy import LLM

        self.llm = LLM(path, skip_tokenizer_init=True, enable_prefix_caching=False, max_model_len=1024, max_num_seqs=32)

    def decode(self, batch: int) -> float:
        prompts = [[prompt_id(i, j) for j in range(PROMPT)] for i in range(batch)]
        outputs = self.llm.generate(prompts, temperature=0, max_tokens=DECODE_TOKENS, ignore_eos=True, use_tqdm=False)
        first = max(o.metrics.first_token_ts for o in outputs)
        last = max(o.metrics.last_token_ts for o in outputs)
        return batch * (DECODE_TOKENS - 1) / (last - first)

    def prefill(self, length: int) -> float:
        prompt = [prompt_id(0, j) for j in range(length)]
        metrics = self.llm.generate([prompt], temperature=0, max_tokens=1, ignore_eos=True, use_tqdm=False)[0].metrics
        return length / (metrics.first_token_ts - metrics.queued_ts)


class Llama:
    """llama.cpp on the same file, through its C interface."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp

        self.c = llama_cpp
        self.silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.silent, None)
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 2048, 512, 512, 32
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(model, params)
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def step(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """rows: token, position, sequence, whether its logits are wanted."""
        self.batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i], self.batch.logits[i] = token, position, wanted
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
        if self.c.llama_decode(self.context, self.batch):
            raise RuntimeError("llama_decode failed")
        self.c.llama_get_logits_ith(self.context, -1)

    def clear(self) -> None:
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)

    def decode(self, batch: int) -> float:
        self.clear()
        self.step([(prompt_id(i, j), j, i, j == PROMPT - 1) for i in range(batch) for j in range(PROMPT)])
        start = time.perf_counter()
        for t in range(DECODE_TOKENS - 1):
            self.step([(prompt_id(i, t), PROMPT + t, i, True) for i in range(batch)])
        return batch * (DECODE_TOKENS - 1) / (time.perf_counter() - start)

    def prefill(self, length: int) -> float:
        self.clear()
        start = time.perf_counter()
        self.step([(prompt_id(0, j), j, 0, j == length - 1) for j in range(length)])
        return length / (time.perf_counter() - start)


def engines(path: Path, threads: int) -> list[Engine]:
    """llmpy, and llama.cpp if it is installed."""
    try:
        return [Ours(path, threads), Llama(path, threads)]
    except ImportError as error:
        if error.name != "llama_cpp":
            raise
        return [Ours(path, threads)]


def measure(path: Path, kind: str, rounds: int, peaks: Peaks) -> list[dict[str, object]]:
    """One row per job: medians of interleaved rounds."""
    compared, rows = engines(path, peaks.threads), []
    for name, job in JOBS.items():
        for engine in compared:
            job(engine)
        samples = []
        for _ in range(rounds):
            time.sleep(REST_S)
            samples.append((peaks.read(), peaks.multiply(), *(job(engine) for engine in compared)))
        reads, flops, mine, *theirs = (statistics.median(column) for column in zip(*samples, strict=True))
        row: dict[str, object] = {
            "type": kind,
            "job": name,
            "llmpy tok/s": round(mine, 1),
            "read GB/s": round(reads, 1),
            "GFLOP/s": round(flops),
        }
        if name == "decode 1":
            row["% of read"] = round(100 * mine * path.stat().st_size / 1e9 / reads)
        elif kind != "file":
            row["% of float32 peak"] = round(100 * 2 * random_gguf.matrix_weights() * mine / 1e9 / flops)
        if theirs:
            ratios = [sample[2] / sample[3] for sample in samples]
            row["llama.cpp tok/s"] = round(theirs[0], 1)
            row["ratio"] = round(statistics.median(ratios), 2)
            row["ratio range"] = f"{min(ratios):.2f}..{max(ratios):.2f}"
        rows.append(row)
        print("  ".join(f"{key}: {value}" for key, value in row.items()), flush=True)
    return rows


def processor() -> str:
    """The processor's name, for the record."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def rate(text: str) -> str:
    """Tokens a second with three digits or more."""
    value = float(text)
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def table(path: Path) -> str:
    """The results of a file as Markdown, below the description of the run in its first line."""
    about, *lines = path.read_text().splitlines()
    of_types: dict[str, dict[str, str]] = {}
    for line in csv.DictReader(lines):
        of_types.setdefault(line["type"], {})[line["job"]] = f"{rate(line['llmpy tok/s'])} ({float(line['ratio']):.2f})"
    model = re.search(r"--model (\S+)\.gguf", about)
    names = {"f32": "float32", "bf16": "bf16", "file": model[1] if model else ""}
    text = re.sub(r"(python benchmarks/[^;]+)", r"`\1`", about.removeprefix("# ")) + ":\n\n"
    text += f"| weights | {', tok/s | '.join(JOBS)}, tok/s |\n|{'---|' * (1 + len(JOBS))}\n"
    for kind, cells in of_types.items():
        text += f"| {names.get(kind, kind.upper())} | {' | '.join(cells[job] for job in JOBS)} |\n"
    return text


def page(text: str) -> str:
    """The page with the tables of all committed results."""
    tables = "\n".join(table(path) for path in sorted(Path(__file__).parent.glob("results_cpu_*.csv")))
    before, _, rest = text.partition(MARKS[0])
    return before + MARKS[0] + "\n" + tables + "\n" + MARKS[1] + rest.partition(MARKS[1])[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="bf16,q8_0,q4_0,f32")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "llmpy-bench")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(page(PAGE.read_text()))
        return
    args.dir.mkdir(parents=True, exist_ok=True)
    peaks, rows = Peaks(args.threads), []
    for kind in ["file"] if args.model else args.types.split(","):
        path = args.model or random_gguf.write(args.dir / f"0.6b-{kind}.gguf", kind)
        rows += measure(path, kind, args.rounds, peaks)
    if args.csv:
        fields = list(dict.fromkeys(key for row in rows for key in row))
        with args.csv.open("w", newline="") as file:
            command = " ".join(["python benchmarks/cpu.py", *sys.argv[1:]])
            file.write(f"# {processor()}, {args.threads} threads, {time.strftime('%Y-%m-%d')}, {command}\n")
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
