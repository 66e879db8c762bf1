"""How long transformers' classes take to become programs, and how much longer a model with a program's file takes to load.

    python benchmarks/conversions.py [--runs 3]

Each conversion is `llmpy export MODEL -o FILE.json` in processes of its own, from config.json to the file, with the imports of
torch and transformers, which are timed alone, too. Loads are `LLM(...)` with dummy weights of a small Llama of 16 layers: by
its written function, and by the program of its class; medians, by turns. The processor's time stands beside the clock's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmpy import LLM

WIDE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128000,
}  # fmt: skip
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
MIXED = {
    "num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 512, "hidden_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000,
}  # fmt: skip
CONVERTED = {
    "Helium, 2 layers": ("helium", "HeliumForCausalLM", {**SMALL, "head_dim": 64, "num_hidden_layers": 2}),
    "Helium of 8B's widths, 32 layers": ("helium", "HeliumForCausalLM", {**WIDE, "head_dim": 128, "num_hidden_layers": 32}),
    "Helium of 8B's widths, 80 layers": ("helium", "HeliumForCausalLM", {**WIDE, "head_dim": 128, "num_hidden_layers": 80}),
    "MiniMax-M2's mixture, 24 layers": ("minimax_m2", "MiniMaxM2ForCausalLM", {**MIXED, "num_hidden_layers": 24}),
}  # fmt: skip
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "kv_cache_memory_bytes": 16 << 20}


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of processors, children's included."""
    start, used = time.perf_counter(), os.times()
    call()
    return time.perf_counter() - start, sum(os.times()[:4]) - sum(used[:4])


def median(times: list[tuple[float, float]]) -> tuple[float, float]:
    """Of each."""
    clock, used = (statistics.median(each) for each in zip(*times, strict=True))
    return clock, used


def folder_of(config: dict[str, object], root: Path, name: str) -> Path:
    """A model's folder with its configuration alone."""
    folder = root / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def export(folder: Path, file: Path) -> None:
    """One conversion, as a user starts it."""
    command = [sys.executable, "-m", "llmpy", "export", str(folder), "-o", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def load(folder: Path, **options: Any) -> None:
    """One load, and the end of the engine."""
    with LLM(folder, load_format="dummy", **OPTIONS, **options):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        imports = [sys.executable, "-c", "import torch, transformers.models.llama.modeling_llama"]
        clock, used = median([timed(lambda: subprocess.run(imports, check=True)) for _ in range(runs)])
        print(f"imports of torch and transformers: {clock:.1f} s, {used:.1f} s of processors", flush=True)
        for label, (kind, architecture, sizes) in CONVERTED.items():
            folder = folder_of({"model_type": kind, "architectures": [architecture], **sizes}, root, label)
            file = root / f"{label}.json"
            clock, used = median([timed(lambda folder=folder, file=file: export(folder, file)) for _ in range(runs)])  # type: ignore[misc]
            print(f"{label}: {clock:.1f} s, {used:.1f} s of processors, {file.stat().st_size >> 10} KiB", flush=True)
        llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL, "num_hidden_layers": 16}
        folder, file = folder_of({**llama, "max_position_embeddings": 4096}, root, "llama"), root / "llama.json"
        export(folder, file)
        load(folder)
        pairs = [(timed(lambda: load(folder)), timed(lambda: load(folder, program=str(file)))) for _ in range(5 * runs)]
        for label, times in zip(("by the written function", "by the program's file"), zip(*pairs, strict=True), strict=True):
            clock, used = (1e3 * each for each in median(list(times)))
            print(f"a load of 16 layers {label}: {clock:.0f} ms, {used:.0f} ms of processors")


if __name__ == "__main__":
    main()
