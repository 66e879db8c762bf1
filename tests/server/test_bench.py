"""`llmpy bench serve` and `sweep` against a server of this process; their formulas on answers made by hand."""

import csv
import io
import json
from argparse import Namespace

import numpy as np
import pytest

from llmpy.cli import main
from llmpy.cli.bench_serve import Answer, arrival_gaps, summary

SMALL = ["--num-prompts", "12", "--input-len", "40", "--output-len", "6", "--repeated-prefix-len", "32", "--suffix-len", "8"]


def figures(capsys, url, *words):
    status = main(["bench", "serve", "--base-url", url, "--json", *words])
    found = json.loads(capsys.readouterr().out)
    assert status == (found["completed"] == 0)
    return found


def test_formulas():
    good = Answer(10, sent=1.0, first=1.5, last=2.5, gaps=[0.25, 0.75], output_tokens=3)
    slow = Answer(20, sent=1.0, first=3.0, last=5.0, gaps=[2.0], output_tokens=2)
    found = summary([good, slow, Answer(5, error="no")], {"ttft": 600, "tpot": 600})
    assert (found["completed"], found["failed"], found["total_input_tokens"], found["total_output_tokens"]) == (2, 1, 30, 5)
    assert found["request_throughput"] == 2 / 4 and found["output_throughput"] == 5 / 4
    assert found["total_token_throughput"] == 35 / 4 and found["request_goodput"] == 1 / 4
    assert found["mean_ttft_ms"] == 1250 and found["mean_tpot_ms"] == (500 + 2000) / 2 and found["mean_itl_ms"] == 1000
    assert found["median_e2el_ms"] == 2750 and found["std_e2el_ms"] == 1250


def test_random(capsys, url, engine):
    before = engine.stats()
    found = figures(capsys, url, *SMALL, "--max-concurrency", "3", "--goodput", "ttft:100000", "--range-ratio", "0.5")
    after = engine.stats()
    assert (found["completed"], found["failed"]) == (12, 0) and found["prefix_cache_hit_rate"] == 0
    assert found["total_output_tokens"] == after.generation_tokens - before.generation_tokens
    assert found["total_input_tokens"] == after.prompt_tokens - before.prompt_tokens
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert 0 < found["median_ttft_ms"] <= found["median_e2el_ms"] and found["server"]["version"]


def test_an_address_may_end_as_clients_have_it(capsys, url):
    assert figures(capsys, f"{url}/v1/", *SMALL)["completed"] == 12


def test_prefixes_are_found_in_the_cache(capsys, url):
    found = figures(capsys, url, *SMALL, "--dataset", "prefix-repetition", "--num-prefixes", "1", "--max-concurrency", "1")
    assert found["prefix_cache_hit_rate"] == pytest.approx(11 / 12 * 32 / 40)


@pytest.mark.parametrize("kind", ["custom", "sharegpt"])
def test_files(capsys, url, tmp_path, kind):
    path = tmp_path / "data"
    if kind == "custom":
        path.write_text("".join(json.dumps({"prompt": f"hello {i}", "output_tokens": 2 + i}) + "\n" for i in range(3)))
    else:
        talk = {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "you"}]}
        path.write_text(json.dumps([talk] * 3 + [{"conversations": []}]))
    words = ["--dataset", kind, "--dataset-path", str(path), "--endpoint", "chat", "--output-len", "3"]
    found = figures(capsys, url, *words)
    assert found["completed"] == 3 and found["total_output_tokens"] == 9


def test_failures_are_counted(capsys, url):
    found = figures(capsys, url, *SMALL, "--model", "none")
    assert (found["completed"], found["failed"], found["request_throughput"]) == (0, 12, 0)
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", *SMALL]) == 1
    assert main(["bench", "serve", "--base-url", url, "--dataset", "custom"]) == 1
    assert main(["bench", "serve", "--base-url", url, *SMALL, "--goodput", "speed:3"]) == 1


def test_a_sweep_ends_where_the_goals_break(capsys, url):
    words = ["bench", "sweep", "--base-url", url, *SMALL, "--concurrencies", "1", "2", "4", "--goodput"]
    assert main([*words, "e2el:100000"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["max_concurrency"] for row in rows] == ["1", "2", "4"]
    assert main([*words, "e2el:0.001"]) == 0
    assert len(list(csv.DictReader(io.StringIO(capsys.readouterr().out)))) == 1


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 20.0])
def test_arrivals(burstiness):
    chosen = Namespace(request_rate=100.0, ramp_up_strategy=None, burstiness=burstiness)
    gaps = np.array(list(arrival_gaps(4001, chosen, 3)))[1:]
    assert gaps.mean() == pytest.approx(0.01, rel=0.1)
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.2)
    chosen.ramp_up_strategy, chosen.ramp_up_start_rps, chosen.ramp_up_end_rps = "linear", 1.0, 100.0
    gaps = np.array(list(arrival_gaps(4001, chosen, 3)))
    assert gaps[1:1001].sum() > 4 * gaps[-1000:].sum()
