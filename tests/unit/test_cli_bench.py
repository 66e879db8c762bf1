"""`llmpy bench` and `llmpy run-batch`, as a user runs them, on a tiny model."""

import json
from pathlib import Path

import pytest
from modules import load

from llmpy import _core
from llmpy.cli import main

files = load(Path(__file__).parents[1] / "helpers/adapter_files.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory, write_model):
    return str(write_model(tmp_path_factory.mktemp("bench")))


OPTIONS = ["--device", "cpu", "--kv-cache-memory-bytes", "4MiB"]


RANKS = ["--tensor-parallel-size", "2"]


def figures(capsys, *words):
    assert main(["bench", *words, *OPTIONS, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_throughput(model, capsys):
    found = figures(capsys, "throughput", model, "--num-prompts", "6", "--input-len", "8", "--output-len", "5")
    assert found["requests"] == 6 and found["cached_tokens"] == 0
    assert found["output_tokens_per_s"] == pytest.approx(30 / found["seconds"])
    assert found["total_tokens_per_s"] == pytest.approx(78 / found["seconds"])


def test_ranks(model, capsys):
    found = figures(capsys, "throughput", model, "--num-prompts", "6", "--input-len", "8", "--output-len", "5", *RANKS)
    assert found["requests"] == 6 and found["output_tokens_per_s"] == pytest.approx(30 / found["seconds"])
    found = figures(capsys, "latency", model, "--batch-size", "2", "--output-len", "4", "--warmups", "1", "--runs", "2", *RANKS)
    assert 0 < found["p10_s"] <= found["p99_s"]


def test_adapters_and_drafts(model, capsys, tmp_path):
    """Prompts have the adapters by turns; drafts are counted."""
    module = "model.layers.0.mlp.down_proj"
    shape = _core.Checkpoint([f"{model}/model.safetensors"]).tensors()[f"{module}.weight"][1]
    files.save(tmp_path, files.factors({module: tuple(shape)}))
    lora = ["--enable-lora", "--max-loras", "2", "--lora-modules", f"a={tmp_path}", f"b={tmp_path}"]
    small = ["--num-prompts", "4", "--input-len", "8", "--output-len", "24"]
    found = figures(capsys, "throughput", model, *small, *lora, "--speculative-config", '{"method": "ngram", "k": 3, "min": 1}')
    assert found["requests"] == 4 and found["draft_tokens"] > 0 and found["tokens_per_step"] >= 1
    assert "draft_tokens" not in figures(capsys, "throughput", model, *small, *lora)
    words = ["--batch-size", "2", "--output-len", "4", "--warmups", "1", "--runs", "2"]
    assert figures(capsys, "latency", model, *words, *lora)["batch_size"] == 2
    assert main(["bench", "throughput", model, *small, *OPTIONS, *lora[3:]]) == 1
    assert "wanted --enable-lora" in capsys.readouterr().err


def test_latency(model, capsys):
    words = ["latency", model, "--batch-size", "2", "--output-len", "4", "--warmups", "1", "--runs", "5"]
    found = figures(capsys, *words)
    assert 0 < found["p10_s"] <= found["p50_s"] <= found["p99_s"] and found["batch_size"] == 2
    assert main(["bench", *words, *OPTIONS]) == 0
    assert "p99_s" in capsys.readouterr().out


def test_startup(model, capsys):
    found = figures(capsys, "startup", model, "--runs", "1")
    assert found["total_s"] == pytest.approx(found["import_s"] + found["load_s"] + found["first_token_s"])
    assert min(found.values()) > 0 and len(found) == 4


def test_run_batch(model, tmp_path, capsys):
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "hello", "max_tokens": 3, "temperature": 0}
    lines = [json.dumps({"custom_id": str(i), "url": "/v1/completions", "body": body}) for i in range(3)]
    requests.write_text("\n".join(lines[:2]))
    words = ["run-batch", model, "-i", str(requests), "-o", str(answers), *OPTIONS]
    assert main(words) == 0 and len(answers.read_text().splitlines()) == 2
    requests.write_text("\n".join([*lines, "nonsense"]))
    assert main(words) == 1
    made = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [item["custom_id"] for item in made] == ["0", "1", "2", "line-4"]
    assert "1 with an error" in capsys.readouterr().err
    of_ranks = tmp_path / "ranks.jsonl"
    requests.write_text("\n".join(lines))
    assert main(["run-batch", model, "-i", str(requests), "-o", str(of_ranks), *OPTIONS, *RANKS]) == 0
    texts = [[item["response"]["body"]["choices"][0]["text"] for item in items] for items in (
        made[:3], map(json.loads, of_ranks.read_text().splitlines()))]  # fmt: skip
    assert texts[0] == texts[1]
