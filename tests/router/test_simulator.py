"""benchmarks/routing.py: its table on a small trace, and that replicas on paper lose nothing."""

import json
from pathlib import Path

import pytest
from modules import load

routing = load(Path(__file__).parents[2] / "benchmarks/routing.py")
TABLE = """
| round-robin | 60.3% | 21 | 13 | 104 | 1.05 |
| load | 60.1% | 22 | 13 | 120 | 1.07 |
| prefix, what was sent alone | 81.6% | 12 | 8 | 79 | 1.19 |
| prefix, events alone, 1 s | 80.8% | 13 | 8 | 80 | 1.09 |
| prefix, events alone, 100 ms | 82.3% | 12 | 8 | 80 | 1.15 |
| prefix, both, 1 s | 82.2% | 12 | 8 | 79 | 1.13 |
| prefix, both, 100 ms | 82.2% | 12 | 8 | 79 | 1.13 |
"""


def test_the_table_of_a_small_trace():
    asks = routing.trace("chat", 1000, 80.0, seed=1)
    rows = [routing.simulate(asks, 4, way).row(way.name) for way in routing.WAYS]
    assert rows == TABLE.strip().splitlines()


@pytest.mark.parametrize("name", ["chat", "agent", "documents"])
def test_nothing_is_lost(name, monkeypatch):
    """Every request gets a first token, loads go back to 0, events tell what caches hold, hits and rows make the prompts."""
    made, replica = [], routing.Replica
    monkeypatch.setattr(routing, "CACHE_TOKENS", 20_000)
    monkeypatch.setattr(routing, "Replica", lambda **options: made.append(replica(**options)) or made[-1])
    asks = routing.trace(name, 300, 30.0, seed=2)
    result = routing.simulate(asks, 3, routing.WAYS[-1])
    assert len(result.firsts) == 300 and min(result.firsts) > 0
    assert sum(one.rows + one.hits for one in made) == sum(ask.size for ask in asks)
    for one in made:
        one.tell(float("inf"), 0.0)
        assert (one.running, one.pending, len(one.waiting)) == (0, 0, 0)
        assert set(one.cache) == set(one.blocks._held) and len(one.cache) * one.block <= 20_000


def test_traces_of_files(tmp_path):
    lines = [
        {"timestamp": 1000 * i, "input_length": 1100 + i, "output_length": 5, "hash_ids": [0, 1, 10 + i]} for i in range(8)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    asks = routing.read_trace(path, 6, 2.0)
    assert len(asks) == 6 and asks[-1].at == pytest.approx(3.0)
    result = routing.simulate(asks, 2, routing.WAYS[-1])
    assert result.hit_rate == pytest.approx(5 * 1024 / sum(ask.size for ask in asks))
