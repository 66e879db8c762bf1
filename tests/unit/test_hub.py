"""Finding a model's files: directories, GGUF files, and a small hub on the loopback interface."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from llmpy.errors import CheckpointError, ModelNotFoundError, UnsupportedError
from llmpy.hub import resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 32}


def write(directory: Path, files: dict[str, bytes]) -> Path:
    """Writes some files; their directory."""
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory


def dump(value: object) -> bytes:
    return json.dumps(value).encode()


SHARDED = {
    "config.json": dump(CONFIG),
    "generation_config.json": dump({"eos_token_id": [2, 3]}),
    "tokenizer.json": b"{}",
    "preprocessor_config.json": dump({"size": 1}),
    "processor_config.json": dump({"size": 2}),
    "model.safetensors.index.json": dump({"weight_map": {"a": "m-2.safetensors", "b": "m-1.safetensors"}}),
    "m-1.safetensors": b"one",
    "m-2.safetensors": b"two",
    "consolidated.safetensors": b"all over again",
    "pytorch_model.bin": b"pickled",
}


def test_sharded_directory(tmp_path: Path) -> None:
    files = resolve(write(tmp_path / "Small-1B", SHARDED))
    assert files.kind == "hf"
    assert files.name == "Small-1B"
    assert [path.name for path in files.weights] == ["m-1.safetensors", "m-2.safetensors"]
    assert files.directory == tmp_path / "Small-1B"
    assert files.config == CONFIG
    assert files.generation_config == {"eos_token_id": [2, 3]}


def test_single_file_and_str_path(tmp_path: Path) -> None:
    names = {"config.json": b"{}", "model.safetensors": b"", "consolidated.safetensors": b"", "other.safetensors": b""}
    files = resolve(str(write(tmp_path, names)))
    assert [path.name for path in files.weights] == ["model.safetensors"]
    assert files.generation_config == {}


def test_gguf_file_and_directory_of_one(tmp_path: Path) -> None:
    write(tmp_path, {"tiny.Q8_0.gguf": b"GGUF", "README.md": b""})
    for model in (tmp_path, tmp_path / "tiny.Q8_0.gguf"):
        files = resolve(model)
        assert (files.kind, files.name, files.directory) == ("gguf", "tiny.Q8_0", None)
        assert files.weights == [tmp_path / "tiny.Q8_0.gguf"]
        assert files.config == {}


def test_all_parts_of_a_split_gguf_file(tmp_path: Path) -> None:
    names = [f"m.Q8_0-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    write(tmp_path, dict.fromkeys(names, b"GGUF"))
    for model in (tmp_path, *(tmp_path / name for name in names)):
        files = resolve(model)
        assert (files.kind, files.name, [path.name for path in files.weights]) == ("gguf", "m.Q8_0", names)


def test_gguf_beside_config(tmp_path: Path) -> None:
    assert resolve(write(tmp_path, {"a.gguf": b"GGUF", "config.json": b"{}"})).kind == "gguf"


def test_text_files_alone(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": dump(CONFIG), "tokenizer.json": b"{}"})
    assert resolve(tmp_path, weights=False).weights == []
    with pytest.raises(ModelNotFoundError, match=r"no \*\.safetensors"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("files", "error", "text"),
    [
        ({"README.md": b""}, ModelNotFoundError, "neither config.json nor a .gguf file"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, UnsupportedError, "a LoRA adapter, .*merge_and_"),
        (
            {"m-00001-of-00003.gguf": b"", "m-00003-of-00003.gguf": b""},
            ModelNotFoundError,
            "m-00002-of-00003.gguf: wanted all 3 parts of m-00001-of-00003.gguf",
        ),
        ({"a.gguf": b"", "b.gguf": b""}, ModelNotFoundError, "2 GGUF files .a.gguf, b.gguf.; name one"),
        (
            {"config.json": b"{}", "pytorch_model.bin": b""},
            UnsupportedError,
            "wanted safetensors, have pytorch_model.bin",
        ),
        ({"config.json": b"{", "model.safetensors": b""}, CheckpointError, "config.json: not valid JSON"),
        ({"config.json": b"[]", "model.safetensors": b""}, CheckpointError, "wanted a JSON object, have list"),
        ({**SHARDED, "model.safetensors.index.json": b"{}"}, CheckpointError, "wanted a weight_map"),
        (
            {**SHARDED, "model.safetensors.index.json": dump({"weight_map": {"a": "../m-1.safetensors"}})},
            CheckpointError,
            "wanted names of files beside it, have '../m-1",
        ),
        (
            {**SHARDED, "model.safetensors.index.json": dump({"weight_map": {"a": "gone.safetensors"}})},
            CheckpointError,
            "gone.safetensors: listed in model.safetensors.index.json and not there",
        ),
    ],
)
def test_bad_directories(tmp_path: Path, files: dict[str, bytes], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        resolve(write(tmp_path, files))
    if isinstance(caught.value, CheckpointError):
        assert caught.value.file is not None


@pytest.mark.parametrize("model", ["/no/such/dir", "./nothing", "~/nothing", "nothing.gguf", "../a/b.gguf", "", "a b"])
def test_absent_path_does_not_touch_the_network(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    if model == "":
        assert tmp_path.is_dir()  # "" means the current directory, which is empty
    with pytest.raises(ModelNotFoundError):
        resolve(model)


def test_absent_path_object_is_no_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFoundError, match="neither a file nor a directory"):
        resolve(Path("org/name"))


def test_other_file_is_unsupported(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": b""})
    with pytest.raises(UnsupportedError, match=r"not \.gguf"):
        resolve(tmp_path / "model.safetensors")


class Hub(BaseHTTPRequestHandler):
    """Speaks the part of the hub's protocol that a download needs."""

    repositories: dict[str, dict[str, bytes]]
    gated: set[str]
    asked: list[str]
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, code: str, status: int = 404) -> None:
        self.answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.asked.append(f"{self.command} {path}")
        api = path.startswith("api/models/")
        parts = path.removeprefix("api/models/").split("/", 4)
        repository = "/".join(parts[:2])
        files = self.repositories.get(repository)
        if files is None:
            return self.refuse("RepoNotFound", 401)
        if repository in self.gated and self.headers.get("Authorization") != "Bearer hf_good":
            return self.refuse("GatedRepo", 403)
        if len(parts) > 3 and parts[3] not in ("main", "v1", COMMIT):
            return self.refuse("RevisionNotFound")
        if api:
            return self.answer(200, dump(self.listing(parts, files)), {"Content-Type": "application/json"})
        if parts[4] not in files:
            return self.refuse("EntryNotFound")
        data = files[parts[4]]
        self.answer(200, data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def listing(self, parts: list[str], files: dict[str, bytes]) -> object:
        if len(parts) > 2 and parts[2] == "tree":
            return [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files.items()]
        return {"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}


@pytest.fixture(scope="module")
def hub() -> Iterator[type[Hub]]:
    """A hub with four repositories, `Hub.url` its address."""
    Hub.repositories = {
        "org/small": SHARDED,
        "org/gguf": {"small.Q4_0.gguf": b"GGUF4", "deep/small.Q8_0.gguf": b"GGUF8", "README.md": b""},
        "org/split": {f"{at}m-0000{number}-of-00002.gguf": b"part" for at in ("", "q8/") for number in (1, 2)},
        "org/secret": {"config.json": b"{}", "model.safetensors": b"weights"},
    }
    Hub.gated, Hub.asked = {"org/secret"}, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Hub.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


SCRIPT = """
import json, sys
from llmpy.hub import resolve
outcomes = []
for arguments in json.loads(sys.argv[1]):
    try:
        files = resolve(**arguments)
        weights = [(path.name, path.read_bytes().decode()) for path in files.weights]
        outcomes.append([files.kind, files.name, str(files.directory), weights, files.config])
    except Exception as error:
        outcomes.append([type(error).__name__, str(error)])
print(json.dumps(outcomes))
"""


def in_process(calls: list[dict[str, Any]], home: Path, url: str, **environment: str) -> list[Any]:
    """What resolve() gives in a fresh process: the hub client reads its environment once."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    extra = {"HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(calls)],
        env={**clean, **extra, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return list(json.loads(run.stdout.splitlines()[-1]))


def test_hub_download_then_offline(hub: type[Hub], tmp_path: Path) -> None:
    url: str = hub.url  # type: ignore[attr-defined]
    hub.asked.clear()
    calls: list[dict[str, Any]] = [
        {"model": "org/small", "weights": False},
        {"model": "org/small"},
        {"model": "org/gguf/small.Q4_0.gguf", "revision": "v1"},
        {"model": "org/gguf/deep/small.Q8_0.gguf"},
        {"model": "org/split/q8/m-00001-of-00002.gguf"},
    ]
    online = in_process(calls, tmp_path, url)
    text_only, small, small4, small8, split = online
    assert text_only[:2] == ["hf", "small"]
    assert text_only[4] == CONFIG
    assert small[3] == [["m-1.safetensors", "one"], ["m-2.safetensors", "two"]]
    assert Path(small[2]).relative_to(tmp_path) == Path(f"hub/models--org--small/snapshots/{COMMIT}")
    assert small4[:2] == ["gguf", "small.Q4_0"]
    assert small4[3] == [["small.Q4_0.gguf", "GGUF4"]]
    assert small8[3] == [["small.Q8_0.gguf", "GGUF8"]]
    assert split[1] == "m" and split[3] == [["m-00001-of-00002.gguf", "part"], ["m-00002-of-00002.gguf", "part"]]
    fetched = {line.rsplit("/", 1)[1] for line in hub.asked if line.startswith("GET org/")}
    assert not fetched & {"consolidated.safetensors", "pytorch_model.bin", "README.md"}
    assert fetched >= {"config.json", "tokenizer.json", "preprocessor_config.json", "processor_config.json"}

    hub.asked.clear()
    assert in_process(calls[1:], tmp_path, url, HF_HUB_OFFLINE="1") == online[1:]
    assert hub.asked == []
    assert in_process(calls[1:], tmp_path, "http://127.0.0.1:9") == online[1:]
    moved = in_process([calls[1]], tmp_path / "none", url, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "hub"))
    assert moved == online[1:2]


def test_hub_errors(hub: type[Hub], tmp_path: Path) -> None:
    url: str = hub.url  # type: ignore[attr-defined]
    calls = [
        {"model": "org/absent"},
        {"model": "org/small", "revision": "v9"},
        {"model": "org/gguf"},
        {"model": "org/gguf/absent.gguf"},
        {"model": "org/secret"},
        {"model": "org/secret", "token": "hf_good"},
    ]
    *failed, good = in_process(calls, tmp_path, url)
    assert [name for name, _ in failed] == ["ModelNotFoundError"] * 5
    wanted = [
        "no such repository on the hub",
        "org/small has no revision v9",
        "org/gguf: has 2 GGUF files (deep/small.Q8_0.gguf, small.Q4_0.gguf); name one, as org/gguf/deep/small.Q8",
        "org/gguf: no file absent.gguf; its GGUF files: deep/small.Q8_0.gguf, small.Q4_0.gguf",
        "org/secret is gated",
    ]
    for (_, text), part in zip(failed, wanted, strict=True):
        assert part in text
    assert good[3] == [["model.safetensors", "weights"]]
    by_commit = [{"model": "org/secret", "revision": COMMIT}]
    assert in_process(by_commit, tmp_path, url, HF_TOKEN="hf_good") == [good]
    assert in_process(by_commit, tmp_path, url, HF_HUB_OFFLINE="1") == [good]


def test_offline_without_a_copy(tmp_path: Path) -> None:
    offline = in_process([{"model": "org/small"}], tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert offline[0][0] == "ModelNotFoundError"
    assert "HF_HUB_OFFLINE is set" in offline[0][1]
    assert "download it where there is a network" in offline[0][1]
    unreachable = in_process([{"model": "org/small"}], tmp_path, "http://127.0.0.1:9")
    assert unreachable[0][0] == "ModelNotFoundError"
    assert "the hub cannot be reached" in unreachable[0][1]


def test_local_path_imports_no_hub_client(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": b"{}", "model.safetensors": b""})
    script = "import sys; from llmpy.hub import resolve; resolve(sys.argv[1]); print('huggingface_hub' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.stdout.strip() == "False", run.stderr


def test_addresses_are_answered_with_the_id() -> None:
    for address in ("https://huggingface.co/org/name", "https://huggingface.co/org/name/tree/main"):
        with pytest.raises(ModelNotFoundError, match=r"is an address; give the hub id 'org/name'"):
            resolve(address)
