"""What `import llmpy` loads; tests/unit/test_import.py says how long it takes."""

import subprocess
import sys

import pytest

import llmpy

HEAVY = "numpy tokenizers jinja2 tqdm huggingface_hub asyncio inspect dataclasses importlib.metadata torch transformers"


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_loads_nothing_heavy_and_starts_no_thread():
    code = (
        "import sys; before = set(sys.modules); import llmpy, threading\n"
        f"print([name for name in {HEAVY!r}.split() if name in sys.modules and name not in before])\n"
        "print(threading.active_count())"
    )
    assert run(code).split("\n")[:2] == ["[]", "1"]


@pytest.mark.parametrize("name", [name for name in llmpy.__all__])
def test_every_public_name_exists(name):
    assert getattr(llmpy, name) is not None
    assert name in dir(llmpy)


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'llmpy' has no attribute 'nonsense'"):
        llmpy.nonsense  # noqa: B018
