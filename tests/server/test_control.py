"""A trainer beside the server: pauses, sleep, and weights from a group, from memory, from a directory."""

import asyncio
import os
import threading

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from llmpy.cli import main
from llmpy.rl import WeightSender, ipc_bucket, weight_metadata
from llmpy.server import build_app

LONG = {"prompt": "hello", "max_tokens": 16000, "ignore_eos": True}
ASK = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def trainer(serve):
    with httpx.Client(base_url=serve(control=True).url, timeout=60) as made:
        yield made


def call(trainer, path, **body):
    response = trainer.post(path, json=body) if body else trainer.post(path)
    assert response.status_code == 200, response.text
    return response.json()


def spans(trainer):
    return call(trainer, "/v1/completions", **ASK)["choices"][0]["weight_versions"]


@pytest.fixture(scope="module")
def weights(engine):
    return load_file(engine.config.model + "/model.safetensors")


@pytest.fixture
def whole(trainer, weights, tmp_path):
    """The model's original weights, which are restored at the end."""
    yield weights
    save_file(weights, tmp_path / "model.safetensors")
    call(trainer, "/start_weight_update")
    call(trainer, "/update_weights", weight_dir=str(tmp_path))
    call(trainer, "/finish_weight_update")


def changed(weights, by):
    return {name: tensor * by for name, tensor in weights.items()}


def test_a_training_loop(trainer, whole, tmp_path):
    """Three updates of different kinds; every answer names its weights."""
    before = call(trainer, "/weight_checker", action="checksum")["checksums"]
    first = call(trainer, "/v1/completions", **ASK)["choices"][0]["token_ids"]
    with WeightSender("127.0.0.1", 0, 2, device="cpu") as sender:
        address = {"master_address": "127.0.0.1", "master_port": sender.master_port, "rank_offset": 1}
        size = trainer.get("/get_world_size").json()["world_size"] + 1
        sent = threading.Thread(target=sender.connect)
        sent.start()
        call(trainer, "/init_weight_transfer_engine", init_info={**address, "world_size": size, "packed": True})
        sent.join()
        new = changed(whole, 0.5)
        names, dtypes, shapes = weight_metadata(new)
        call(trainer, "/pause?mode=keep")
        call(trainer, "/start_weight_update", is_checkpoint_format=True)
        sent = threading.Thread(target=sender.send, args=(new,))
        sent.start()
        call(trainer, "/update_weights", update_info={"names": names, "dtype_names": dtypes, "shapes": shapes, "packed": True})
        sent.join()
        report = call(trainer, "/finish_weight_update", weight_version="half")["report"]
        call(trainer, "/resume")
    assert report["version"] == "half" and report["num_tensors"] == len(new)
    assert spans(trainer) == [[0, 4, "half", report["epoch"]]]
    assert trainer.get("/weight_info").json() == {"weight_version": "half", "weight_epoch": report["epoch"]}
    assert not call(trainer, "/weight_checker", action="compare", baseline=before)["match"]

    bucket = ipc_bucket(changed(whole, 2.0))
    described = {"handle": bucket.handle, "nbytes": bucket.nbytes, "items": bucket.items, "device_uuid": bucket.device_uuid}
    call(trainer, "/start_weight_update")
    call(trainer, "/update_weights", update_info={"buckets": [described]})
    call(trainer, "/finish_weight_update", weight_version=7)
    assert spans(trainer)[0][2] == 7

    save_file(whole, tmp_path / "model.safetensors")
    call(trainer, "/update_weights", weight_dir=str(tmp_path))
    assert call(trainer, "/weight_checker", action="compare", baseline=before) == {"match": True, "mismatches": []}
    assert call(trainer, "/v1/completions", **ASK)["choices"][0]["token_ids"] == first
    call(trainer, "/update_weight_version", new_version="same")
    assert trainer.get("/weight_info").json()["weight_version"] == "same"


def test_a_reset_shows_what_an_update_brings(trainer, whole, tmp_path):
    before = call(trainer, "/weight_checker", action="checksum")["checksums"]
    assert call(trainer, "/weight_checker", action="reset") == {"status": "reset"}
    assert trainer.get("/weight_info").json()["weight_version"] == "reset"
    unlike = call(trainer, "/weight_checker", action="compare", baseline=before)
    assert unlike == {"match": False, "mismatches": sorted(before)}
    assert call(trainer, "/v1/completions", **ASK)["usage"]["completion_tokens"] == 4  # they can be computed with
    left_out = sorted(whole)[0]
    save_file({name: tensor for name, tensor in whole.items() if name != left_out}, tmp_path / "model.safetensors")
    call(trainer, "/start_weight_update", partial=True)
    call(trainer, "/update_weights", weight_dir=str(tmp_path))
    call(trainer, "/finish_weight_update")
    assert call(trainer, "/weight_checker", action="compare", baseline=before)["mismatches"] == [left_out]
    save_file(whole, tmp_path / "model.safetensors")
    call(trainer, "/update_weights", weight_dir=str(tmp_path))
    assert call(trainer, "/weight_checker", action="compare", baseline=before)["match"]
    assert "checksum, compare or reset" in trainer.post("/weight_checker", json={"action": "wipe"}).json()["error"]["message"]


def test_updates_that_do_not_fit(trainer, whole, tmp_path):
    call(trainer, "/init_weight_transfer_engine", init_info={})  # no group: an earlier one ends
    for body, why in (
        ({"update_info": {"ipc_handles_pickled": "gASVAA=="}}, "pickled"),
        ({"update_info": {"names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [[64]]}}, "no weight group"),
        ({"weight_dir": str(tmp_path / "none")}, "safetensors"),
        ({}, "update_info"),
    ):
        response = trainer.post("/update_weights", json=body)
        assert response.status_code == 400 and why in response.json()["error"]["message"], response.text
    assert "begun" in trainer.post("/finish_weight_update").json()["error"]["message"]
    name, tensor = next(iter(whole.items()))
    save_file({name: tensor}, tmp_path / "model.safetensors")
    call(trainer, "/start_weight_update")
    call(trainer, "/update_weights", weight_dir=str(tmp_path))
    response = trainer.post("/finish_weight_update")
    assert response.status_code == 400 and "were not written" in response.json()["error"]["message"]
    call(trainer, "/start_weight_update")  # the first one is given up; `whole` writes all that it left torn


def test_pauses(trainer, engine, wait_until):
    with trainer.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        call(trainer, "/pause?mode=keep")
        assert trainer.get("/is_paused").json() == {"is_paused": True} and engine.stats().num_unfinished == 1
        for ids in ([], ["another"]):
            assert call(trainer, "/abort_requests", request_ids=ids) == {"status": "aborted", "aborted": 0}
        assert engine.stats().num_unfinished == 1
        assert call(trainer, "/abort_requests") == {"status": "aborted", "aborted": 1}
        assert '"finish_reason":"abort"' in "".join(lines)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call(trainer, "/v1/completions", **ASK)))
    thread.start()
    wait_until(lambda: engine.stats().num_unfinished)
    assert not answers
    call(trainer, "/resume")
    thread.join(60)
    assert answers and trainer.get("/is_paused").json() == {"is_paused": False}
    assert trainer.post("/pause?mode=soon").status_code == 400 and trainer.post("/pause?timeout=x").status_code == 400


def test_sleep(trainer, engine):
    tokens = call(trainer, "/v1/completions", **ASK)["choices"][0]["token_ids"]
    call(trainer, "/sleep?level=1&tags=weights&tags=kv_cache")
    assert trainer.get("/is_sleeping").json() == {"is_sleeping": True} and engine.stats().sleep_level == 1
    assert call(trainer, "/wake_up?tags=weights") == {"status": "asleep"}
    assert call(trainer, "/wake_up") == {"status": "awake"}
    call(trainer, "/reset_prefix_cache")
    assert call(trainer, "/v1/completions", **ASK)["choices"][0]["token_ids"] == tokens


def test_a_sleeping_server_may_refuse(serve, trainer, http):
    url = serve(control=True, reject_when_asleep=True).url
    http.post(f"{url}/sleep?level=1").raise_for_status()
    response = http.post(f"{url}/v1/completions", json=ASK)
    assert response.status_code == 503 and response.headers["retry-after"] and "/wake_up" in response.json()["error"]["message"]
    http.post(f"{url}/wake_up").raise_for_status()
    assert http.post(f"{url}/v1/completions", json=ASK).status_code == 200


def test_calls_by_name(trainer):
    assert call(trainer, "/collective_rpc", method="get_world_size") == {"results": [1]}
    sums = call(trainer, "/collective_rpc", method="weight_checksum")["results"][0]
    assert sums == call(trainer, "/weight_checker", action="checksum")["checksums"]
    response = trainer.post("/collective_rpc", json={"method": "close"})
    assert response.status_code == 501 and "weight_checksum" in response.json()["error"]["message"]
    assert trainer.post("/collective_rpc", json={"method": "sleep", "kwargs": {"colour": 1}}).status_code == 400
    assert trainer.post("/start_profile").status_code == 501
    config = trainer.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.float32" and np.isfinite(config["cache_config"]["num_gpu_blocks"])


def test_who_may_control(serve, client, http):
    assert client.post("/pause").status_code == 404 and "--control" in client.post("/pause").json()["error"]["message"]
    url = serve(control=True, control_keys=("boss",), api_keys=("user",)).url
    for key, status in (("boss", 200), ("user", 401), ("other", 401)):
        assert http.get(f"{url}/is_paused", headers={"authorization": f"Bearer {key}"}).status_code == status
    local = serve(control=True).url
    assert http.get(f"{local}/is_paused").status_code == 200
    for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):  # a page in a browser of this machine
        assert http.get(f"{local}/is_paused", headers=headers).status_code == 403


def test_another_machine_needs_a_key(engine):
    async def status(app):
        transport = httpx.ASGITransport(app=app, client=("10.1.2.3", 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get("/is_paused", headers={"x-api-key": "boss"})).status_code

    assert asyncio.run(status(build_app(engine, control=True))) == 403
    assert asyncio.run(status(build_app(engine, control=True, control_keys=("boss",)))) == 200


def test_drain(serve, http):
    ended = []
    url = serve(control=True, on_drain=lambda: ended.append(True)).url
    assert http.get(f"{url}/health").status_code == 200
    assert http.post(f"{url}/drain").status_code == 202 and ended == [True]
    assert http.get(f"{url}/health").status_code == http.post(f"{url}/v1/completions", json=ASK).status_code == 503


def test_control_beyond_this_machine_wants_keys(capsys, tmp_path):
    words = ["serve", str(tmp_path), "--host", "0.0.0.0", "--control"]
    assert main(words) == 1 and "--control-key-file" in capsys.readouterr().err
    keys = tmp_path / "keys"
    keys.write_text("boss\n")
    assert main([*words, "--control-key-file", str(keys)]) == 1  # the folder holds no model
    assert "--control-key-file" not in capsys.readouterr().err


def test_times_and_handles_that_are_none(trainer):
    for time in ("nan", "inf", "-1"):
        response = trainer.post(f"/pause?timeout={time}")
        assert response.status_code == 400 and response.json()["error"]["param"] == "timeout"
    assert not trainer.get("/is_paused").json()["is_paused"]
    info = {"buckets": [{"handle": "\u00e9", "nbytes": 1, "items": []}]}
    response = trainer.post("/update_weights", json={"update_info": info})
    assert response.status_code == 400 and "base64" in response.json()["error"]["message"]


def test_where_the_application_is_mounted_opens_nothing(engine):
    """A path that begins like the mount point is the path that the router sees."""

    async def status(path, root):
        app = build_app(engine, control=True, control_keys=("sesame",))
        transport = httpx.ASGITransport(app=app, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get(path)).status_code

    for path, root in (("/is_paused", ""), ("/api/is_paused", "/api"), ("/is_paused", "/is"), ("/is_paused", "/")):
        assert asyncio.run(status(path, root)) == 401, (path, root)


def test_trls_asynchronous_client(trainer):
    pytest.importorskip("accelerate").PartialState()
    client = pytest.importorskip("trl.experimental.async_grpo.vllm_client").VLLMClient(str(trainer.base_url))
    client.wait_for_server_ready()
    assert client.get_dtype() == "torch.float32" and client.get_world_size() == 1 and client.get_max_model_len() == 16384
    client.pause()
    client.resume()


def test_trls_client(trainer, engine, monkeypatch):
    module = pytest.importorskip("trl.generation.vllm_client")
    monkeypatch.setattr(module, "is_vllm_available", lambda: True)  # it speaks to servers of vLLM's paths
    client = module.VLLMClient(host="0.0.0.0", server_port=trainer.base_url.port)
    assert client.get_server_info()["weight_transfer_config"]["backend"] == "nccl" and client.get_world_size() == 1
    made = client.generate([[1, 2, 3], [4, 5]], n=2, max_tokens=5, temperature=0.7, logprobs=1)
    assert made["prompt_ids"] == [[1, 2, 3], [4, 5]] and len(made["completion_ids"]) == 4
    assert [len(ids) for ids in made["completion_ids"]] == [len(values) for values in made["logprobs"]]
    talk = [[{"role": "user", "content": "hello"}]]
    said = client.chat(talk, max_tokens=4, logprobs=0)
    assert said["prompt_ids"][0] == call(trainer, "/tokenize", messages=talk[0])["tokens"]
    assert [ids for (ids,) in said["logprob_token_ids"][0]] == said["completion_ids"][0]
    whole = made["prompt_ids"][0] + made["completion_ids"][0]
    scored = client.get_sequence_logprobs([whole], [3], top_logprobs=5)
    assert [ids for (ids,) in scored["actual_token_ids"][0]] == made["completion_ids"][0]
    expected = asyncio.run(_scores(engine, whole))[2:]
    assert np.allclose(np.ravel(scored["actual_logprobs"]), expected, rtol=1e-6)
    client.reset_prefix_cache()


async def _scores(engine, ids):
    return (await engine.score(ids)).token_logprobs


def test_what_a_trainer_sends_wrong_is_its_own_mistake(trainer, engine, tmp_path, caplog):
    """Truncated files, wrong files, impossible sizes, a missing trainer: 400 without a traceback."""
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"\xff" * 7)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    item = ["w", "float32", [2], 0]

    def bucket(handle, nbytes=8, items=(item,)):
        return {"update_info": {"buckets": [{"handle": str(handle), "nbytes": nbytes, "items": items, "device_uuid": ""}]}}

    asks = {
        "a FIFO": bucket(fifo),
        "a directory": bucket(tmp_path),
        "has expired": bucket(tmp_path / "nowhere"),
        "nbytes must be": bucket(fifo, -1),
        "2**62": bucket(fifo, 2**63 - 1),
        "is no tensor": bucket(fifo, 8, [["w", "float32", [0, 2**63 - 1], 0]]),
        "wanted at least 8 bytes, have 7": {"weight_dir": str(torn)},
    }
    for text, body in asks.items():
        response = trainer.post("/update_weights", json=body)
        assert response.status_code == 400 and text in response.json()["error"]["message"], (text, response.text)
    info = {"master_address": "127.0.0.1", "master_port": 1, "timeout": 0.3}
    response = trainer.post("/init_weight_transfer_engine", json={"init_info": info})
    assert response.status_code == 400 and "wanted a store at 127.0.0.1:1" in response.json()["error"]["message"]
    assert not [record for record in caplog.records if record.exc_info]
    engine.check_health()
    assert trainer.post("/v1/completions", json=ASK).status_code == 200
