"""Fixtures for tests of several folders, such as the devices of this machine; and the choice of the llmpy to test.

A test that makes sense on every device takes `device` (the processor as it is chosen by default, and a CUDA device) or
`each_device` (every instruction set of the processor, and a CUDA device). Where there is no CUDA device its cases do not exist;
the last lines of a run say so once. The variable TEST_DEVICES names other devices for both, such as "opencl:0": those of
an installed package with a backend.

In a clone the working directory's own package has no built core. It must not shadow the installed one, neither here (as
it would under `python -m pytest`) nor in processes that tests start: all processes test the same llmpy.
"""

import contextlib
import gc
import importlib.util
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests interrupt themselves; a script's background job ignores it
os.environ["PYTHONSAFEPATH"] = "1"
if processes := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # each with its share of the processors
    os.environ.setdefault("LLMPY_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(processes))))
if not any((ROOT / "llmpy").glob("_core*.so")):
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
elif (found := importlib.util.find_spec("llmpy")) and found.origin == str(ROOT / "llmpy/__init__.py"):
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


from llmpy import _core, devices, hardware  # noqa: E402

CPUS = [f"cpu:{isa}" for isa in _core.cpu_isas()]
GPU = devices()[1]  # the first one, or why there is none
CUDA = [GPU["device"]] if GPU["available"] else []
OTHERS = os.environ.get("TEST_DEVICES", "").split()
LONGEST = (
    "test_c.py", "test_guides.py", "test_loss.py", "test_verl.py", "test_code_blocks.py", "test_fuzz.py", "test_demo_model.py",
    "test_site.py", "test_examples.py", "test_ray.py", "test_notebooks.py", "test_opencl.py", "test_soak.py",
)  # fmt: skip
"""Files with few tests that take 15 seconds to minutes. One that began last would run alone, behind the end of all others."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-demo-model", action="store_true", help="skip what needs it: a machine without a network")
    parser.addoption("--shard", default="0/1", metavar="I/N", help="every Nth test from the Ith on, for N processes")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):  # xdist would begin with the files that have the most tests
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first, step = map(int, config.getoption("--shard").split("/"))
    kept = [item for item in items if CUDA or not {"cuda", "two_gpus"} & {*getattr(item, "fixturenames", ())}][first::step]
    left_out = set(items) - set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    if hasattr(config, "workerinput"):  # files are shared out to several processes in this order
        ranks, sizes = {name: rank for rank, name in enumerate(LONGEST)}, Counter(item.path for item in kept)
        kept.sort(key=lambda item: (ranks.get(item.path.name, len(ranks)), -sizes[item.path]))
    items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = ", ".join(OTHERS or [*CPUS, *(f"{device} ({GPU['name']})" for device in CUDA)])
    terminalreporter.write_line(f"devices: {found}" + ("" if CUDA else f"; no CUDA cases: {GPU['reason']}"))


@pytest.fixture(scope="session")
def write_model() -> Callable[..., Path]:
    """Writes the tiny model of tests/api into a directory."""
    spec = importlib.util.spec_from_file_location("tiny_models", ROOT / "tests/api/conftest.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: Callable[..., Path] = module.make_model
    return made


@pytest.fixture(scope="session", params=OTHERS or ["cpu", *CUDA])
def device(request: pytest.FixtureRequest) -> str:
    """Name of the processor, then of a CUDA device."""
    return str(request.param)


@pytest.fixture(scope="session", params=OTHERS or [*CPUS, *CUDA])
def each_device(request: pytest.FixtureRequest) -> str:
    """Name of every instruction set of the processor, then of a CUDA device."""
    return str(request.param)


@pytest.fixture(scope="session", params=_core.cpu_isas())
def isa(request: pytest.FixtureRequest) -> str:
    """Every instruction set of the processor, for tests of the CPU alone."""
    return str(request.param)


@pytest.fixture(scope="session")
def cuda() -> str:
    """Name of the first CUDA device, for tests of CUDA alone; without a CUDA device they are left out."""
    return str(CUDA[0])


@pytest.fixture(scope="session")
def two_gpus() -> str:
    """Name of the first of two CUDA devices or more."""
    if not any(device["device"] == "cuda:1" for device in devices()):
        pytest.skip("one CUDA device")
    return str(CUDA[0])


@pytest.fixture(scope="session")
def core_options() -> Callable[[str], dict[str, str]]:
    """Converts a device's name to arguments of the core's classes."""

    def options(device: str) -> dict[str, str]:
        kind, _, isa = device.partition(":")
        if kind == "cpu":
            return {"device": kind, "isa": isa or "auto"}
        return {"device": device, "isa": "auto", "library": hardware.library(device)}

    return options


@pytest.fixture(scope="session")
def demo_model(request: pytest.FixtureRequest) -> Path:
    """SmolLM2-135M-Instruct in Q4_1, fetched once per machine."""
    from llmpy.demo import fetch_model

    if request.config.getoption("--without-demo-model"):
        pytest.skip("run without the demo model")
    return fetch_model()


@pytest.fixture(scope="session")
def reserve_port() -> Iterator[Callable[[], int]]:
    """Reserves ports of this machine. Only servers that bind with SO_REUSEADDR or SO_REUSEPORT can use them."""
    with contextlib.ExitStack() as stack:

        def reserve() -> int:
            one = stack.enter_context(socket.socket())
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                one.setsockopt(socket.SOL_SOCKET, option, 1)
            one.bind(("127.0.0.1", 0))
            return int(one.getsockname()[1])

        yield reserve


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """Ray on this machine alone, with little memory; its workers find llmpy where this process does.

    By default its routers choose another replica if the best one does not report its load within 0.1 s; here they wait.
    """
    ray = pytest.importorskip("ray")
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    os.environ |= {f"RAY_SERVE_{most}QUEUE_LENGTH_RESPONSE_DEADLINE_S": "60" for most in ("", "MAX_")}
    before = Path.cwd()
    # The names of Ray's sockets must be short; and its workers look for modules where it was started: not in a clone.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        os.chdir(folder)
        ray.init(num_cpus=6, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        os.chdir(before)
        yield
        ray.shutdown()


class Stall:
    """Measures the longest time that a thread which is ready to run could not run."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._ends.is_set():
            time.sleep(0.002)
            now = time.perf_counter()
            self.seconds, last = max(self.seconds, now - last), now

    def end(self) -> None:
        """Ends the measurement."""
        self._ends.set()
        self._thread.join()


@pytest.fixture(scope="session")
def longest_stall() -> Callable[[], contextlib.AbstractContextManager[Stall]]:
    """Measures how long other threads cannot run inside a block, because the GIL is held.

    A garbage collection holds the GIL and visits every object of the process. Objects of earlier tests are left out of it.
    """

    @contextlib.contextmanager
    def block() -> Iterator[Stall]:
        gc.collect()
        gc.freeze()
        stall = Stall()
        try:
            yield stall
        finally:
            stall.end()
            gc.unfreeze()

    return block
