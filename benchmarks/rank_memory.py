"""Bytes of weights and of the cache on each device, by model and number of ranks, from the programs of the ranks.

    python benchmarks/rank_memory.py                     # the table of docs/use/parallel.md; takes a minute
    python benchmarks/rank_memory.py "Llama 3 8B" --ranks 1,2

It needs neither weights nor a device. A cell has GB of bfloat16 weights and KB of cache a token, on the rank that has most of
each. Weights of 8 bits take half of that, of 4 bits about a quarter.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from llmpy import models
from llmpy.models.program import Spec
from llmpy.models.shard import shard

RELEASED = json.loads((Path(__file__).parents[1] / "tests/models/released.json").read_text())
LLAMA = "Llama 2, 3, 3.1, 3.2 (text) and 3.3"
OF_70B = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "Llama 3 8B": (LLAMA, {}),
    "Qwen2.5 32B": ("QwQ-32B", {}),
    "Llama 3 70B": (LLAMA, OF_70B),
    "Qwen3 30B-A3B": ("Qwen3-30B-A3B", {}),
    "Qwen3 235B-A22B": ("Qwen3-235B-A22B", {}),
    "DeepSeek V3": ("DeepSeek-V3", {}),
}
ITEM_BYTES = 2


def weight_bytes(spec: Spec) -> int:
    """Bytes of a rank's matrices and vectors."""
    return ITEM_BYTES * sum(weight["rows"] * weight["cols"] for weight in spec["weights"])


def token_bytes(spec: Spec) -> int:
    """Bytes of a token in a rank's cache, of layers that keep all tokens; a layer without kv heads keeps one latent."""
    layers = [(heads, dim) for _, heads, dim, window in spec["layers"] if not window]
    return ITEM_BYTES * sum(2 * heads * dim if heads else dim for heads, dim in layers)


def row(name: str, counts: Sequence[int]) -> str:
    """A line of the table."""
    released, changes = MODELS[name]
    config = {key: value for key, value in RELEASED[released]["config"].items() if key != "quantization_config"} | changes
    spec = models.load(SimpleNamespace(kind="hf", directory=name, weights=[], config=config), None).spec  # type: ignore[arg-type]
    cells = []
    for count in counts:
        ranks = shard(spec, count)
        weights, token = max(map(weight_bytes, ranks)), max(map(token_bytes, ranks))
        cells.append(f"{weights / 1e9:.1f} GB, {token / 1e3:.3g} KB")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*MODELS])
    parser.add_argument("--ranks", default="1,2,4,8")
    args = parser.parse_args()
    counts = [int(count) for count in args.ranks.split(",")]
    print(f"| model | {' | '.join(f'{count} devices' if count > 1 else '1 device' for count in counts)} |")
    print("|---" * (1 + len(counts)) + "|")
    for name in args.models:
        print(row(name, counts), flush=True)


if __name__ == "__main__":
    main()
