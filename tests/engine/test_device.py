"""Lifetime of an engine on a CUDA device: memory freed to the byte, faults, other engines and torch in the same process.

Tests of faults and of memory run in separate processes, so that they do not disturb other tests.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import llmpy
from binding import Backend
from llmpy import _core, hardware

pytestmark = pytest.mark.alone
LIBRARY = hardware.cuda_library()
DEVICE = next((d for d in llmpy.devices()[1:] if d["available"]), None)
needs_device = pytest.mark.skipif(DEVICE is None, reason="no CUDA device")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch")
PROMPTS = [[1, 5, 9, 3], [1, *range(20, 90)], [7], [1, *range(5, 40)]]
OPTIONS = {"skip_tokenizer_init": True, "device": "cuda:0", "kv_cache_memory_bytes": 1 << 24, "max_num_batched_tokens": 64,
           "max_num_seqs": 8}  # fmt: skip
LARGE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048,
    "num_hidden_layers": 4, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
MIB = 1 << 20
KERNELS = Path(__file__).parents[2] / "kernels"  # of binding


def free_bytes() -> int:
    return _core.device_info("cuda:0", LIBRARY, True)[3]


def greedy(llm: llmpy.LLM, n: int = 12) -> list[list[int]]:
    return llm.generate(PROMPTS, temperature=0, max_tokens=n, ignore_eos=True).token_ids


def run_script(script: str, *args: object, **environment: str) -> list[str]:
    """Runs a script in a new process and returns its lines; the process must exit with 0 and print nothing on stderr."""
    header = f"OPTIONS = {OPTIONS!r}\nPROMPTS = {PROMPTS!r}\nKERNELS = {str(KERNELS)!r}\n" + SHARED
    done = subprocess.run(
        [sys.executable, "-c", header + script, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0 and not done.stderr, done.stderr + done.stdout
    return done.stdout.splitlines()


SHARED = """
import json, sys
sys.path.append(KERNELS)
import numpy as np
import llmpy
from binding import Backend
from llmpy import LLM, _core, hardware
def open_engine(path, **options): return LLM(path, **{**OPTIONS, **options})
def greedy(llm, n=12): return llm.generate(PROMPTS, temperature=0, max_tokens=n, ignore_eos=True).token_ids
def free_bytes(): return _core.device_info("cuda:0", hardware.cuda_library(), True)[3]
def arm():
    '''What selects a row far outside of all memory when it is called.'''
    backend = Backend("cuda:0", max_rows=8, max_cols=4096, vocab_size=8, library=hardware.cuda_library())
    x = np.zeros((1, 4096), np.float32)
    def fire():
        try:
            backend.select(x, np.array([2**31 - 1], np.int32), x.copy())
        except llmpy.DeviceError as error:
            return error
        raise SystemExit("no fault")
    return fire
"""


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a config alone, for dummy weights of 0.7 GB."""
    path = tmp_path_factory.mktemp("large")
    (path / "config.json").write_text(json.dumps(LARGE))
    return path


@pytest.fixture
def open_engine(tiny_model: Callable[[str, str], Path]) -> Callable[..., llmpy.LLM]:
    def make(**options: object) -> llmpy.LLM:
        return llmpy.LLM(tiny_model("qwen3", "bfloat16"), **{**OPTIONS, **options})

    return make


# ---- choosing a device


def test_a_machine_without_a_driver_says_so() -> None:
    script = "import llmpy; print([d.get('reason') for d in llmpy.devices()[1:]])"
    lines = run_script(script, CUDA_VISIBLE_DEVICES="")
    assert len(lines) == 1 and ("driver" in lines[0] or "device" in lines[0] or "build" in lines[0])
    if DEVICE is None:
        with pytest.raises(llmpy.DeviceError, match=r"driver|device|build"):
            llmpy.LLM("/nowhere", device="cuda:0")
    assert run_script("print(hardware.choose(None))", CUDA_VISIBLE_DEVICES="") == ["cpu"]


def test_an_import_loads_no_driver() -> None:
    script = "print([line.split()[-1] for line in open('/proc/self/maps') if 'cuda' in line.lower()])"
    assert run_script(script) == ["[]"]


@needs_device
def test_devices_have_numbers_uuids_and_sizes() -> None:
    found = DEVICE or {}
    assert found["device"] == "cuda:0" and found["uuid"].startswith("GPU-") and len(found["uuid"]) == 40
    assert found["memory_bytes"] > found["free_bytes"] > 0
    assert hardware.choose(found["uuid"]) == hardware.choose(found["uuid"][:12]) == hardware.choose(0) == "cuda:0"
    assert hardware.choose(None) == "cuda:0"
    n_devices = len(llmpy.devices()) - 1
    with pytest.raises(llmpy.DeviceError, match=f"has {n_devices} CUDA device"):
        hardware.choose(n_devices)
    # CUDA_VISIBLE_DEVICES numbers anew; listing devices leaves no context behind.
    script = "print([d['uuid'] for d in llmpy.devices()[1:]]); print(hardware.choose(0), hardware.choose(None))"
    assert run_script(script, CUDA_VISIBLE_DEVICES=found["uuid"]) == [str([found["uuid"]]), "cuda:0 cuda:0"]


@needs_device
def test_types_follow_the_checkpoint(tiny_model: Callable[[str, str], Path]) -> None:
    for dtype in ("bfloat16", "float16"):
        with llmpy.LLM(tiny_model("llama", dtype), **{**OPTIONS, "device": None}) as llm:
            assert (llm.config.device, llm.config.dtype, llm.config.kv_cache_dtype) == ("cuda:0", dtype, dtype)
            [rank] = llm.ranks()
            assert rank["uuid"] == (DEVICE or {})["uuid"] and rank["name"] == (DEVICE or {})["name"]


# ---- memory


@needs_device
def test_pools_keep_their_addresses() -> None:
    backend = Backend("cuda:0", max_rows=64, max_cols=4096, vocab_size=64, dtype="bfloat16", library=LIBRARY)
    data = np.arange(32 * MIB, dtype=np.uint32).astype(np.uint16) & 0x3FFF  # 64 MiB of finite bfloat16
    matrix = backend.matrix([("bfloat16", 8192, data)], 4096)
    pool = backend.kv_pool(64, 8, 128, "bfloat16", 64, fill=1)
    row = np.empty((1, 4096), np.float32)
    backend.matrix_read(matrix, 8191, 1, row)
    held, before = backend.memory(), row.copy()
    assert held["weights"] >= 64 * MIB and held["kv"] >= 16 * MIB
    for use, name in enumerate(("weights", "kv")):
        backend.pool_release(use)
        asleep = backend.memory()
        assert asleep[name] == 0 and asleep["free"] - held["free"] == held[name]
        backend.pool_restore(use)
        backend.pool_restore(use)
        assert backend.memory() == held
    backend.matrix_read(matrix, 8191, 1, row)
    assert (row == 0).all() and set(backend.kv_read(pool)) == {0}
    backend.matrix_write(matrix, 0, 0, 8192, data)
    backend.matrix_read(matrix, 8191, 1, row)
    assert (row == before).all() and (row != 0).any()


@needs_device
def test_everything_is_given_back(tiny_model: Callable[[str, str], Path], large_model: Path) -> None:
    script = """
from pathlib import Path
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
left = []
for cycle in range(5):
    llm, other = open_engine(sys.argv[1]), open_engine(sys.argv[2], load_format="dummy", max_model_len=512)
    greedy(llm); greedy(other); greedy(llm)
    held = llm.memory()
    llm.close(); other.close(); llm.close()
    left.append((free_bytes(), resident()))
    del llm, other
print(json.dumps(left))
"""
    [line] = run_script(script, tiny_model("qwen3", "bfloat16"), large_model)
    left = json.loads(line)
    assert len({free for free, _ in left[1:]}) == 1 and left[0][0] - left[-1][0] in (0, left[0][0] - left[1][0]), left
    assert left[0][0] == left[-1][0], left
    assert left[-1][1] - left[1][1] < 8 * MIB, left


@needs_device
def test_memory_is_all_that_is_held(large_model: Path) -> None:
    script = """
open_engine(sys.argv[1], load_format="dummy", max_model_len=512).close()  # the context and the kernels stay
before = free_bytes()
llm = open_engine(sys.argv[1], load_format="dummy", max_model_len=512)
held = llm.memory()
print(json.dumps([before - free_bytes(), held]))
"""
    [line] = run_script(script, large_model)
    taken, held = json.loads(line)
    counted = sum(held[name] for name in ("weights", "kv", "activations", "sampler", "staging", "workspaces", "graphs"))
    assert counted <= taken <= counted + 64 * MIB, (taken, held)
    assert held["weights"] > 600 * MIB and held["kv"] == 16 * MIB and held["device_free"] < held["device_total"]


@needs_device
def test_nothing_is_allocated_after_warm_up(open_engine: Callable[..., llmpy.LLM]) -> None:
    with open_engine() as llm:
        llm.generate(PROMPTS, temperature=0, max_tokens=4, ignore_eos=True)
        for turn in range(3):
            llm.generate([[3 + turn, *range(5, 100)], *PROMPTS], temperature=0.9, top_k=20, max_tokens=24, n=2, seed=turn,
                         logprobs=2, frequency_penalty=0.2)  # fmt: skip
            llm.score([list(range(3, 60))], logprobs=2)
        assert llm.stats().num_steps > 30 and llm.stats().allocations_since_warmup == 0


@needs_device
def test_the_share_is_the_engines_own(large_model: Path) -> None:
    script = """
options = {"load_format": "dummy", "kv_cache_memory_bytes": None}
def pool(share):
    with open_engine(sys.argv[1], gpu_memory_utilization=share, **options) as llm:
        return llm.memory()["kv"]
first = pool(0.2)
backend = Backend("cuda:0", max_rows=8, max_cols=4096, vocab_size=8, library=hardware.cuda_library())
other = backend.kv_pool(1024, 8, 128, "bfloat16", 64)  # 256 MiB outside the engine
assert pool(0.2) == first
total = backend.memory()["total"]
assert 0.2 * total - 3e9 < first < 0.2 * total
llm = open_engine(sys.argv[1], gpu_memory_utilization=0.5, **options)
before = free_bytes()
for wrong in ({"gpu_memory_utilization": 0.6}, {"kv_cache_memory_bytes": 10**12}):
    try:
        open_engine(sys.argv[1], **{**options, **wrong})
    except llmpy.DeviceMemoryError as error:
        assert str(next(iter(wrong))) in str(error) and "close() another engine" in str(error), error
        assert error.wanted_bytes > error.free_bytes > 0, (error.wanted_bytes, error.free_bytes)
    else:
        raise SystemExit("no error")
    assert free_bytes() == before
greedy(llm)
"""
    assert run_script(script, large_model) == []


@needs_device
def test_a_model_larger_than_the_device_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LARGE | {"num_hidden_layers": 400, "intermediate_size": 65536}))
    with pytest.raises(llmpy.DeviceMemoryError, match=r"weights: wanted \d+ bytes, have \d+ free of \d+; choose"):
        llmpy.LLM(tmp_path, load_format="dummy", **OPTIONS)
    before = free_bytes()
    with pytest.raises(llmpy.DeviceMemoryError) as caught:
        llmpy.LLM(tmp_path, load_format="dummy", **OPTIONS)
    assert caught.value.wanted_bytes > caught.value.free_bytes > 0
    assert free_bytes() == before


# ---- faults and neighbours


@needs_device
def test_a_fault_poisons_the_engines_of_the_device(tiny_model: Callable[[str, str], Path]) -> None:
    script = """
import time
idle, busy, cpu = open_engine(sys.argv[1]), open_engine(sys.argv[1]), open_engine(sys.argv[1], device="cpu")
wanted = greedy(cpu)
greedy(idle), greedy(busy)
error = arm()()
assert error.code == 700 and "start a new" in str(error), error
begun = time.monotonic()
for llm in (idle, busy):
    for attempt in range(3):
        try:
            greedy(llm)
        except llmpy.DeviceError as error:
            assert "illegal" in str(error) and error.code == 700, error
            assert attempt == 0 or isinstance(error, llmpy.EngineDeadError), error
        else:
            raise SystemExit("the engine is alive")
    llm.stats()
idle.close(); busy.close(); busy.close()
try:
    open_engine(sys.argv[1])
except llmpy.DeviceError as error:
    assert "start a new" in str(error), error
assert time.monotonic() - begun < 20
assert greedy(cpu) == wanted
print("done")
"""
    assert run_script(script, tiny_model("qwen3", "bfloat16")) == ["done"]


@needs_device
def test_a_fault_names_its_operation(tiny_model: Callable[[str, str], Path]) -> None:
    """A fault of other work on the device, seen at the next wait: usually after an operation, else at the ends of the step."""
    script = """
import threading
llm, fire = open_engine(sys.argv[1]), arm()
thread = threading.Timer(0.05, fire)
thread.start()
try:
    for _ in range(1000):
        greedy(llm)
except llmpy.DeviceError as error:
    print(error)
thread.join()
"""
    model = tiny_model("qwen3", "bfloat16")
    named = re.compile(r"operation \d+ \((linear|attention|qkv|add|rms_norm|embed|select|logits).*\): .*illegal")
    assert any(named.search(run_script(script, model, LLMPY_SYNC="1")[0]) for _ in range(5))


@needs_device
def test_a_fault_ends_the_streams(tiny_model: Callable[[str, str], Path]) -> None:
    script = """
import asyncio, time
async def main():
    engine = await llmpy.AsyncEngine.create(sys.argv[1], **OPTIONS)
    fire, ended = arm(), 0
    params = llmpy.SamplingParams(max_tokens=400, ignore_eos=True, temperature=0)
    streams = [engine.generate(prompt, params) for prompt in PROMPTS]
    async for _ in streams[0]:
        break
    fire()
    async def drain(stream):
        async for _ in stream:
            pass
    for stream in (*streams[1:], None):
        try:
            await drain(stream or engine.generate([1, 2], params))
        except llmpy.DeviceError as error:
            assert "illegal" in str(error), error
            ended += 1
    assert ended >= 2 and engine.errored and "illegal" in str(engine.dead_error), ended
    begun = time.monotonic()
    await engine.shutdown()
    engine.close()
    assert time.monotonic() - begun < 20
    print("done")
asyncio.run(main())
"""
    assert run_script(script, tiny_model("qwen3", "bfloat16")) == ["done"]


@needs_device
@pytest.mark.parametrize("how", ["", "llm = None", "gc.collect()", "other = open_engine(sys.argv[1], seed=1)"])
def test_an_exit_without_close_is_fine(tiny_model: Callable[[str, str], Path], how: str) -> None:
    script = f"import gc\nllm = open_engine(sys.argv[1]); greedy(llm)\n{how}\nprint('done')"
    assert run_script(script, tiny_model("qwen3", "bfloat16")) == ["done"]


@needs_device
def test_two_engines_of_a_process(open_engine: Callable[..., llmpy.LLM], tiny_model: Callable[[str, str], Path]) -> None:
    with open_engine() as one, llmpy.LLM(tiny_model("llama", "float16"), **OPTIONS) as two:
        wanted = [greedy(one), greedy(two)]
        assert wanted[0] != wanted[1]
        for _ in range(3):
            assert [greedy(one), greedy(two)] == wanted
        got: dict[int, list[list[list[int]]]] = {0: [], 1: []}

        def drive(which: int, llm: llmpy.LLM) -> None:
            for _ in range(10):
                got[which].append(greedy(llm))

        threads = [threading.Thread(target=drive, args=(i, llm)) for i, llm in enumerate((one, two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert got == {0: [wanted[0]] * 10, 1: [wanted[1]] * 10}


@needs_device
@needs_torch
@pytest.mark.parametrize("order", ["before", "after"])
def test_torch_in_the_same_process(tiny_model: Callable[[str, str], Path], order: str) -> None:
    script = """
if sys.argv[2] == "before":
    import torch
    kept = torch.arange(1000, device="cuda")
llm = open_engine(sys.argv[1])
wanted = greedy(llm)
import threading, torch
if not torch.cuda.is_available():
    print("done"); sys.exit()
if sys.argv[2] == "after":
    kept = torch.arange(1000, device="cuda")
x = torch.randn(2048, 2048, device="cuda")
product = x @ x
stop = threading.Event()
def work():
    while not stop.is_set():
        assert torch.equal(x @ x, product)
thread = threading.Thread(target=work); thread.start()
for _ in range(8):
    assert greedy(llm) == wanted
stop.set(); thread.join()
assert torch.cuda.current_device() == 0
llm.close()
assert torch.equal(x @ x, product) and int(kept.sum()) == 499500
with open_engine(sys.argv[1]) as again:
    assert greedy(again) == wanted
print("done")
"""
    assert run_script(script, tiny_model("qwen3", "bfloat16"), order) == ["done"]
