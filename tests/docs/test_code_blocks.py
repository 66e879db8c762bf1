"""Every code block of README.md and docs/: Python and shell blocks run, and quotations occur in the named file.

The text after a fence's language:

    python                  runs; a page's blocks share a namespace, which `PAGES` fills with the names that the page assumes
    python trainer          runs in a separate process, beside the next block
    python from FILE        is in that file, word for word
    python not run: REASON  (or sh) cannot run here
    sh                      `llmpy ...` runs; `llmpy serve` and `route` in the background, while the page lasts
    text, toml              do not run; toml is parsed
    new, in, check          belong to a guide for developers, see test_guides.py; c is always one of these
"""

import ast
import asyncio
import base64
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from modules import load

from llmpy import LLM, AsyncEngine
from llmpy.server.formats import FORMATS

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = {"device": "cpu", "kv_cache_memory_bytes": "16MiB"}
SHOWN = re.compile(r"^print\(.*\) +# (.+)$", re.MULTILINE)
"""A print call at the start of a line with its expected output."""
MOST_NOT_RUN = 7
DEMO = '("demo"'


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is the number of its first line of text."""

    page: Path
    line: int
    language: str
    note: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    source, found = page.read_text(), []
    for match in FENCE.finditer(source):
        language, _, note = match["info"].partition(" ")
        if not language.startswith("{"):  # a directive of the site
            line = source.count("\n", 0, match.start("text")) + 1
            found.append(Block(page, line, language, note, match["text"]))
    return found


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
OF_A_GUIDE = r"new \S+$|in \S+ (?:behind|before) +\S|check(?: sh)?$"
ELSEWHERE = re.compile(rf"from \S+$|not run: \S|{OF_A_GUIDE}")
RUN = [block for block in BLOCKS if block.language in ("python", "sh") and not ELSEWHERE.match(block.note)]


def test_every_block_says_what_it_is() -> None:
    unknown = [str(block) for block in BLOCKS if block.language not in ("c", "python", "sh", "text", "toml")]
    assert not unknown, f"a fence needs a language: {unknown}"
    assert not [str(block) for block in BLOCKS if block.note not in ("", "trainer") and not ELSEWHERE.match(block.note)]
    assert not [str(block) for block in BLOCKS if block.language == "c" and not re.match(OF_A_GUIDE, block.note)]
    not_run = [str(block) for block in BLOCKS if block.note.startswith("not run: ")]
    assert len(not_run) <= MOST_NOT_RUN, not_run


def test_quotations() -> None:
    quoted = [block for block in BLOCKS if block.note.startswith("from ")]
    assert quoted
    for block in quoted:
        assert block.text in (ROOT / block.note.removeprefix("from ")).read_text(), str(block)
    for block in BLOCKS:
        if block.language == "toml":
            tomllib.loads(block.text)


def test_extras_that_texts_name_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [*PAGES, ROOT / "CONTRIBUTING.md", *(ROOT / "llmpy").rglob("*.py")]
    named = {name for file in files for name in re.findall(r"(?:llmpy|\"\.)\[([a-z,-]+)\]", file.read_text())}
    assert named and not {one for name in named for one in name.split(",")} - set(extras)


class Tools:
    """Tools that pages need to run.

    Args:
        tiny: A tiny Llama.
        write_model: Writes another tiny model.
        folder: Folder for its files.
        demo: Fetches the demo model.
        port: Reserves a port.
    """

    def __init__(
        self, tiny: Path, write_model: Callable[..., Path], folder: Path, demo: Callable[[], Path], port: Callable[[], int]
    ) -> None:
        self.tiny, self.demo, self.port = tiny, demo, port
        self._write_model, self.folder = write_model, folder

    def another(self, name: str, **changes: Any) -> Path:
        """A tiny model with another configuration."""
        path = self.folder / name
        path.mkdir()
        return self._write_model(path, **changes)


@dataclass
class Setting:
    """The setting of a page's blocks: names, replaced words, and the first lines of trainer processes."""

    names: dict[str, Any]
    words: dict[str, str]
    trainer: str = ""


def weights_of(path: Path) -> SimpleNamespace:
    """The stand-in for a trainer's model."""
    from safetensors.numpy import load_file

    tensors = load_file(path / "model.safetensors")
    return SimpleNamespace(named_parameters=tensors.items, state_dict=lambda: tensors)


def own_architecture(tools: Tools) -> Setting:
    path = tools.another("own", architectures=["MyForCausalLM"], num_hidden_layers=8)
    return Setting({}, {"path/to/my-checkpoint": str(path)})


def async_engine(tools: Tools) -> Setting:
    """The page ends a request that is running: one of the tiny model's ends by itself after 8 ms."""
    slow = tools.another("slow", num_hidden_layers=120, max_position_embeddings=1024)
    return Setting({"engine": AsyncEngine(slow, **{**SMALL, "kv_cache_memory_bytes": "32MiB"}, banned_token_ids=[2])}, {})


def chat(tools: Tools) -> Setting:
    path = tools.another("chat", max_position_embeddings=2048)
    template = "{{ tools | tojson }}<tool_call>{% for message in messages %}{{ message.content }}{% endfor %}</think>"
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return Setting({}, {"Qwen/Qwen3-0.6B": str(path)})


def pooling(tools: Tools) -> Setting:
    return Setting({}, {"Qwen/Qwen3-Embedding-0.6B": str(tools.tiny), "path/to/a-reward-model": str(reward_model(tools))})


def reward_model(tools: Tools) -> Path:
    """The tiny model with a head for one score."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    path = tools.another("reward", architectures=["LlamaForSequenceClassification"], num_labels=1, pad_token_id=0)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "score.weight": np.ones((1, 64), np.float32)}, path / "model.safetensors")
    return path


def rl(tools: Tools) -> Setting:
    model = weights_of(tools.tiny)
    pairs = list(model.named_parameters())
    names = {
        "llm": LLM(tools.tiny, **SMALL),
        "engine": AsyncEngine(tools.tiny, **SMALL),
        "model": model,
        "step": 3,
        "buckets": [pairs[:2], pairs[2:]],
        "pairs": pairs,
        "num_parts": 2,
    }
    trainer = (
        "from safetensors.numpy import load_file\n"
        "from types import SimpleNamespace\n"
        f"tensors = load_file({str(tools.tiny / 'model.safetensors')!r})\n"
        "model = SimpleNamespace(named_parameters=tensors.items)\n"
        "parts = [list(tensors.items())[:2], list(tensors.items())[2:]]\n"
    )
    return Setting(names, {"10.0.0.1": "127.0.0.1", "29500": str(tools.port())}, trainer)


def tiers(tools: Tools) -> Setting:
    return Setting({}, {"/tmp/llmpy": str(tools.folder / "ipc"), "unix:prefill": f"unix:docs-{os.getpid()}"})


def vision(tools: Tools) -> Setting:
    pytest.importorskip("PIL")
    tiny = load(ROOT / "tests/helpers/tiny_llava.py")
    photo = tiny.photo(tools.folder / "photo.png")
    url = "data:image/png;base64," + base64.b64encode(photo.read_bytes()).decode()
    words = {"path/of/a/model": str(tiny.write(tools.folder / "llava")), "photo.jpg": str(photo)}
    return Setting({}, {**words, "data:image/png;base64,...": url})


SETTINGS: Mapping[str, Callable[[Tools], Setting]] = {
    "adding-an-architecture": own_architecture,
    "async-engine": async_engine,
    "chat": chat,
    "pooling": pooling,
    "rl": rl,
    "tiers": tiers,
    "vision": vision,
}
"""Page -> its setting. Other pages need only the demo model and path/to/model."""


class Page:
    """Runs the blocks of a page.

    Args:
        setting: The setting of the blocks.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._names: dict[str, Any] = {"__name__": "page", **setting.names}
        self._loop = asyncio.new_event_loop()
        self._processes: list[subprocess.Popen[str]] = []
        self._listener: Listener | None = None

    def run(self, block: Block) -> None:
        """Runs a block; errors show the page's lines."""
        text = self._replaced(block.text)
        if block.language == "sh":
            for line in block.text.splitlines():
                self._command(shlex.split(self._replaced(line), comments=True))
        elif block.note == "trainer":
            self._begin_trainer(text)
        else:
            self._python(block, text)
            self._join()

    def _replaced(self, text: str) -> str:
        for word, other in self._setting.words.items():
            text = text.replace(word, other)
        return text

    def _python(self, block: Block, text: str) -> None:
        code = compile("\n" * (block.line - 1) + text, block.page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if not code.co_flags & inspect.CO_COROUTINE:
            exec(code, self._names)
            return

        async def run() -> None:
            await eval(code, self._names)

        self._loop.run_until_complete(run())

    def _begin_trainer(self, text: str) -> None:
        """Starts a process; each side has a `connection` to the other."""
        self._listener = Listener()
        begin = f"from multiprocessing.connection import Client\nconnection = Client({self._listener.address!r})\n"
        self._start([sys.executable, "-c", begin + self._setting.trainer + text])
        self._names["connection"] = self._listener.accept()

    def _join(self) -> None:
        """Waits for the trainer, if there is one."""
        if self._listener is not None:
            self._listener.close()
            process = self._processes.pop()
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
            self._listener = None

    def _command(self, words: list[str]) -> None:
        if words[:1] == ["llmpy"] and words[1] in ("serve", "route"):
            port = words[words.index("--port") + 1] if "--port" in words else "8000"
            device = ["--device", "cpu"] if words[1] == "serve" else []
            process = self._start([sys.executable, "-m", *words, "--port", "0", *device])
            assert process.stderr is not None
            lines = []
            while not (lines and lines[-1].startswith("http://")):
                lines.append(process.stderr.readline())
                assert lines[-1], lines
            self._setting.words[f"http://127.0.0.1:{port}"] = lines[-1].strip().removesuffix("/v1")
        elif words[:1] == ["llmpy"]:
            subprocess.run([sys.executable, "-m", *words], check=True, timeout=600)
        elif words:
            assert words[:2] == ["pip", "install"], words  # its extras are compared with pyproject.toml

    def _start(self, words: list[str]) -> "subprocess.Popen[str]":
        self._processes.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return self._processes[-1]

    def close(self) -> None:
        """Ends engines, processes and the loop."""
        for value in self._names.values():
            if isinstance(value, LLM | AsyncEngine):
                value.close()
        for process in self._processes:
            process.terminate()
            process.communicate(timeout=300)
        self._loop.close()


@pytest.fixture
def tools(
    tmp_path: Path,
    write_model: Callable[..., Path],
    reserve_port: Callable[[], int],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Tools:
    monkeypatch.setenv("LLMPY_DEVICE", "cpu")
    (tmp_path / "tiny").mkdir()
    tiny = write_model(tmp_path / "tiny", max_position_embeddings=1024)
    return Tools(tiny, write_model, tmp_path, lambda: request.getfixturevalue("demo_model"), reserve_port)


@pytest.fixture
def local_serve(local_ray: None, reserve_port: Callable[[], int]) -> Iterator[None]:
    """Ray Serve on a free port."""
    serve = pytest.importorskip("ray.serve")
    serve.start(http_options={"port": reserve_port()})
    yield
    serve.shutdown()


@pytest.fixture
def page(request: pytest.FixtureRequest, tools: Tools) -> Iterator[tuple[Page, list[Block]]]:
    """A page's blocks, and a Page that runs them."""
    blocks = [block for block in RUN if block.page == request.param]
    if request.param.stem == "ray":
        request.getfixturevalue("local_serve")
    setting = SETTINGS.get(request.param.stem, lambda tools: Setting({}, {}))(tools)
    setting.words["path/to/model"] = str(tools.tiny)
    if any(DEMO in block.text for block in blocks):
        tools.demo()
    page, formats = Page(setting), dict(FORMATS)
    yield page, blocks
    page.close()
    FORMATS.clear()  # what a page registers goes with it
    FORMATS.update(formats)


@pytest.mark.parametrize("page", sorted({block.page for block in RUN}), indirect=True, ids=lambda path: path.stem)
def test_blocks(page: tuple[Page, list[Block]], capsys: pytest.CaptureFixture[str]) -> None:
    runner, blocks = page
    for block in blocks:
        runner.run(block)
        printed = capsys.readouterr().out.splitlines()
        for shown in SHOWN.findall(block.text):
            assert shown in printed, f"{block}: prints no line {shown}"
