"""Adapters over HTTP: names of models that load, answer and go; the metric by which routers find them."""

import asyncio
import json
import threading
from pathlib import Path

import httpx
import pytest
from modules import load
from prometheus_client.parser import text_string_to_metric_families
from safetensors import safe_open

from llmpy import AsyncEngine
from llmpy.cli import bench_serve, main
from llmpy.cli.adapters import load as load_modules
from llmpy.cli.adapters import modules
from llmpy.errors import ConfigError
from llmpy.server import build_app

files = load(Path(__file__).parents[1] / "helpers/adapter_files.py")
ASK = {"prompt": [1, 2, 3], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}


@pytest.fixture(scope="module")
def lora(tmp_path_factory, write_model):
    """An engine with adapters, and the directories of two adapters."""
    model = write_model(tmp_path_factory.mktemp("served"), max_position_embeddings=4096)
    with safe_open(model / "model.safetensors", "numpy") as file:
        names = [name for name in file.keys() if "_proj.weight" in name]  # noqa: SIM118
        shapes = {name.removesuffix(".weight"): tuple(file.get_slice(name).get_shape()) for name in names}
    to = tmp_path_factory.mktemp("adapters")
    made = [str(files.save(to / name, files.factors(shapes, 4, seed))) for seed, name in enumerate("ab")]
    engine = AsyncEngine(model, device="cpu", enable_lora=True, max_loras=1, kv_cache_memory_bytes="64MiB")
    yield engine, made
    engine.close()


@pytest.fixture(scope="module")
def trainer(lora, running):
    with httpx.Client(base_url=running(build_app(lora[0], served_model_name=("tiny",), control=True)).url, timeout=60) as made:
        yield made


def add(trainer, name, path, **more):
    return trainer.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


@pytest.fixture
def clean(lora):
    yield
    for one in lora[0].list_adapters():
        lora[0].remove_adapter(one.name)


@pytest.mark.usefixtures("clean")
def test_a_name_is_a_model(trainer, lora):
    engine, paths = lora
    response = add(trainer, "maths", paths[0])
    assert response.status_code == 200 and response.text == "Success: LoRA adapter 'maths' added successfully."
    tiny, maths = trainer.get("/v1/models").json()["data"]
    assert (tiny["id"], tiny["parent"]) == ("tiny", None)
    assert (maths["id"], maths["parent"], maths["root"]) == ("maths", "tiny", paths[0])
    assert trainer.get("/v1/models/maths").json()["parent"] == "tiny"
    answers = {name: trainer.post("/v1/completions", json={**ASK, "model": name}).json() for name in ("tiny", "maths")}
    assert {name: answer["model"] for name, answer in answers.items()} == {"tiny": "tiny", "maths": "maths"}
    params = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    for name, answer in answers.items():
        wanted = asyncio.run(take(engine.generate({"prompt_token_ids": [1, 2, 3]}, lora_request=adapter_of(name), **params)))
        shown = answer["choices"][0]
        assert shown["token_ids"] == list(wanted.outputs[0].token_ids)
        assert shown["logprobs"]["token_logprobs"] == pytest.approx(wanted.outputs[0].sampled.raw.tolist(), abs=1e-6)
    assert answers["tiny"]["choices"][0]["logprobs"] != answers["maths"]["choices"][0]["logprobs"]


def adapter_of(name):
    return None if name == "tiny" else name


async def take(stream):
    return await stream


@pytest.mark.usefixtures("clean")
def test_every_path_takes_the_name(trainer, lora):
    add(trainer, "maths", lora[1][0])
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0, "logprobs": True}
    ids = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "temperature": 0, "logprobs": 0}}
    bodies = {
        "/v1/chat/completions": chat,
        "/v1/embeddings": {"input": "hello"},
        "/v1/score": {"text_1": "hello", "text_2": "you"},
        "/inference/v1/generate": ids,
    }
    for path, body in bodies.items():
        found = [trainer.post(path, json={**body, "model": name}).json() for name in ("tiny", "maths")]
        key = "data" if "data" in found[0] else "choices"
        assert found[0][key] != found[1][key], path
    messages = {"messages": chat["messages"], "max_tokens": 4, "model": "maths"}
    assert trainer.post("/v1/messages", json=messages).json()["model"] == "maths"
    assert (
        trainer.post("/v1/responses", json={"input": "hello", "max_output_tokens": 4, "model": "maths"}).json()["model"]
        == "maths"
    )
    lines = trainer.post("/v1/completions", json={**ASK, "model": "maths", "stream": True}).text
    assert '"model":"maths"' in lines and lines.endswith("data: [DONE]\n\n")


@pytest.mark.usefixtures("clean")
def test_what_is_refused(trainer, lora, running):
    paths = lora[1]
    assert add(trainer, "maths", paths[0]).status_code == 200
    for body, status, text in (
        ({"lora_name": "maths", "lora_path": paths[1]}, 400, "is loaded already; load_inplace"),
        ({"lora_name": "tiny", "lora_path": paths[1]}, 400, "is a name of the model"),
        ({"lora_name": "", "lora_path": paths[1]}, 400, "wanted lora_name and lora_path"),
        ({"lora_name": "b"}, 400, "lora_path"),
        ({"lora_name": "b", "lora_path": "/nowhere"}, 404, "have no adapter_config.json"),
    ):
        response = trainer.post("/v1/load_lora_adapter", json=body)
        assert (response.status_code, text in response.json()["error"]["message"]) == (status, True), response.text
    assert trainer.post("/v1/unload_lora_adapter", json={"lora_name": "b"}).status_code == 404
    for name in ("b", "Maths"):
        response = trainer.post("/v1/completions", json={**ASK, "model": name})
        assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"
        assert "use tiny or maths" in response.json()["error"]["message"]
    response = trainer.post("/v1/completions", json={**ASK, "lora_request": "maths"})
    assert response.status_code == 400 and "use model" in response.json()["error"]["message"]
    closed = running(build_app(lora[0])).url
    assert "--control" in httpx.post(f"{closed}/v1/load_lora_adapter", json={}).json()["error"]["message"]


@pytest.mark.usefixtures("clean")
def test_replaced_and_removed(trainer, lora):
    paths = lora[1]

    def ask():
        return trainer.post("/v1/completions", json={**ASK, "model": "maths"}).json()["choices"][0]["logprobs"][
            "token_logprobs"
        ]

    add(trainer, "maths", paths[0])
    first = ask()
    assert add(trainer, "maths", paths[1], load_inplace=True).status_code == 200
    second = ask()
    assert first != second
    add(trainer, "other", paths[0])
    response = trainer.post("/v1/unload_lora_adapter", json={"lora_name": "maths"})
    assert response.text == "Success: LoRA adapter 'maths' removed successfully."
    assert trainer.post("/v1/completions", json={**ASK, "model": "maths"}).status_code == 404
    assert [one["id"] for one in trainer.get("/v1/models").json()["data"]] == ["tiny", "other"]


def labels(trainer, prefix="vllm:"):
    found = {family.name: family for family in text_string_to_metric_families(trainer.get("/metrics").text)}
    (sample,) = found[f"{prefix}lora_requests_info"].samples
    return sample


@pytest.mark.usefixtures("clean")
def test_the_metric(trainer, lora, wait_until, pausing):
    """One slot: the second adapter's request waits."""
    idle = labels(trainer)
    assert idle.labels["max_lora"] == "1" and idle.labels["running_lora_adapters"] == idle.labels["waiting_lora_adapters"] == ""
    assert labels(trainer, "llmpy:").value >= idle.value > 1.6e9
    for name, path in zip("ab", lora[1], strict=True):
        add(trainer, name, path)
    long = {"prompt": [1, 2], "max_tokens": 3000, "ignore_eos": True, "n": 4}
    threads = [
        threading.Thread(target=trainer.post, args=("/v1/completions",), kwargs={"json": {**long, "model": name}})
        for name in "ab"
    ]
    threads[0].start()
    wait_until(lambda: labels(trainer).labels["running_lora_adapters"] == "a")
    with pausing(lora[0]):  # the first request cannot end before the second waits
        threads[1].start()
        wait_until(lambda: labels(trainer).labels["waiting_lora_adapters"] == "b")
        assert labels(trainer).labels["running_lora_adapters"] == "a" and all(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join()
    assert labels(trainer).labels["running_lora_adapters"] == labels(trainer).labels["waiting_lora_adapters"] == ""


class Chosen:
    def __init__(self, *words, enable_lora=True):
        self.lora_modules, self.enable_lora = words, enable_lora


@pytest.mark.usefixtures("clean")
def test_modules_of_the_command_line(lora):
    engine, paths = lora
    wanted = modules(Chosen(f"a={paths[0]}", f'{{"name": "b", "path": "{paths[1]}", "base_model_name": "x"}}'))
    assert wanted == {"a": paths[0], "b": paths[1]}
    load_modules(engine, wanted, ("tiny",))
    assert [one.name for one in engine.list_adapters()] == ["a", "b"]
    for words in (["a"], ["a="], ["=x"], ["a=x", "a=y"], ["{"], ['{"name": "a"}']):
        with pytest.raises(ConfigError, match="wanted NAME=PATH"):
            modules(Chosen(*words))
    with pytest.raises(ConfigError, match="--enable-lora"):
        modules(Chosen("a=x", enable_lora=False))
    with pytest.raises(ConfigError, match="is a name of the model"):
        load_modules(engine, {"tiny": paths[0]}, ("tiny",))


def test_a_benchmark_names_adapters_by_turns(lora, trainer, clean, capsys, monkeypatch):
    asked = []
    own = bench_serve._body
    monkeypatch.setattr(bench_serve, "_body", lambda ask, name, chosen: asked.append(name) or own(ask, name, chosen))
    for name, path in zip("ab", lora[1], strict=True):
        add(trainer, name, path)
    words = ["--num-prompts", "4", "--input-len", "8", "--output-len", "2", "--lora-modules", "a", "b", "--json"]
    assert main(["bench", "serve", "--base-url", str(trainer.base_url), *words]) == 0
    assert json.loads(capsys.readouterr().out)["completed"] == 4
    assert asked == ["a", "b", "a", "b"]
