"""Memory that is short when an engine is made: the error names the cache's size and its option."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import numpy
import llmpy, llmpy.models, llmpy.text.tokenizer, tokenizers
from llmpy import LLM, DeviceMemoryError
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]), -1))
try:
    LLM(sys.argv[1], device="cpu", kv_cache_memory_bytes="1GiB")
except DeviceMemoryError as error:
    print(error.wanted_bytes, error)
"""


@pytest.mark.parametrize("room", [64 << 20, 256 << 20, 600 << 20])
def test_the_cache_is_named(tiny_model, room):
    words = [sys.executable, "-c", SCRIPT, str(tiny_model), str(room)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"{1 << 30} {tiny_model}: out of memory while the engine was made; the cache alone wants")
    assert "lower kv_cache_memory_bytes" in done.stdout and "ulimit -v" in done.stdout
