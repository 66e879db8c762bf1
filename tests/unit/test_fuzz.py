"""Runs the libFuzzer targets of the readers for a while on seeds made here."""

import json
import os
import shlex
import shutil
import struct
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from packed_files import LAYOUTS, SORTED, numbers_of

ROOT = Path(__file__).parents[2]
SECONDS = 8
FLAGS = shlex.split(
    "-std=c11 -Wall -Wextra -Werror -O1 -g -ffp-contract=off -fsanitize=fuzzer,address,undefined "
    "-fno-sanitize-recover=undefined"
)
SOURCES = [
    *(ROOT / "csrc/base" / name for name in ("dtype.c", "file.c", "json.c", "mem.c", "name_table.c", "status.c")),
    *(ROOT / "csrc/program" / name for name in ("gguf.c", "safetensors.c", "tensor_list.c")),
]
JOINING = [ROOT / "csrc/program" / name for name in ("checkpoint.c", "companions.c", "packed.c", "tables.c")]


def safetensors_seeds() -> list[bytes]:
    """Small files that the reader takes, with escapes, an empty tensor and an unknown type."""
    headers: list[tuple[dict[str, object], int]] = [
        ({}, 0),
        ({"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, 16),
        (
            {
                "é\n😀": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]},
                "empty": {"dtype": "I64", "shape": [0, 4], "data_offsets": [6, 6]},
                "new": {"dtype": "F8_E4M3", "shape": [], "data_offsets": [6, 7], "more": [{"x": -1.5e3}, None, True]},
            },
            7,
        ),
    ]
    texts = [(json.dumps(header).encode(), n) for header, n in headers]
    return [struct.pack("<Q", len(text)) + text + bytes(n) for text, n in texts]


def gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_seeds() -> list[bytes]:
    """Small files that the reader takes: one of every kind of value, aligned tensors, an unknown type."""
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    pairs = [gguf_string(b"k%d" % kind) + struct.pack("<I", kind) + bytes(n) for kind, n in sizes.items()]
    pairs += [
        gguf_string(b"general.alignment") + struct.pack("<II", 4, 32),
        gguf_string(b"split.count") + struct.pack("<IH", 2, 1),
        gguf_string(b"text") + struct.pack("<I", 8) + gguf_string(b"llama"),
        gguf_string(b"texts") + struct.pack("<IIQ", 9, 8, 2) + gguf_string(b"a") + gguf_string(b"\xff"),
        gguf_string(b"nested") + struct.pack("<IIQIQ", 9, 9, 1, 5, 2) + bytes(8),
    ]
    tensors = [
        gguf_string(name) + struct.pack("<IQQIQ", 2, columns, 1, kind, offset)
        for name, columns, kind, offset in [
            (b"a", 32, 3, 0), (b"b", 256, 14, 32), (b"c", 4, 0, 256), (b"d", 8, 24, 288)
        ]
    ]
    files = []
    for chosen, infos, n_data in [([], [], 0), (pairs, [], 0), ([], tensors, 296), (pairs, tensors, 296)]:
        body = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(chosen)) + b"".join(chosen) + b"".join(infos)
        files.append(body + bytes(-len(body) % 32) + bytes(n_data))
    return files


SCHEMES = ["", "compressed-tensors", "gptq", "gptq_v2", "awq", "squeezellm"]
"""As fuzz_joined.c numbers them."""


def joined_seeds() -> list[bytes]:
    """A small weight of every way to store it in several tensors, behind the number of its scheme."""
    rng, seeds = np.random.default_rng(3), []

    def add(tensors: dict[str, np.ndarray], scheme: str = "") -> None:
        made = {f"a{ending}": np.ascontiguousarray(tensor) for ending, tensor in tensors.items()}
        seeds.append(bytes([SCHEMES.index(scheme)]) + safetensors.numpy.save(made))

    for name in ("gptq-32", "gptq-8-32", "awq-32", "rows-32", "rows-8-64", "rows-asym", "int8-bf16", "int8-tensor"):
        layout = LAYOUTS[name]
        add(layout.write(layout, *numbers_of(layout, 8, 64, rng)), str(layout.config["quant_method"]))
    layout = SORTED["gptq-v2"]
    add(layout.write(layout, *numbers_of(layout, 8, 128, rng)), "gptq_v2")
    add({".qweight": np.ones((4, 8), np.int32), ".lookup_table": np.ones((8, 16), np.float16)}, "squeezellm")
    fp8 = rng.integers(0, 126, (8, 160), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    add({".weight": fp8, ".weight_scale_inv": np.ones((1, 2), np.float32)})
    add({".weight": fp8, ".weight_scale": np.ones((8, 1), np.float16)})
    stack = fp8.reshape(2, 4, 160)
    for shape in ((2, 4, 1), (2,), (2, 1, 160)):
        add({"": stack, "_scale": np.ones(shape, np.float32)})
    add({".weight": np.ones((4, 8), np.int8), ".SCB": np.ones(4, np.float32)})
    add({"_blocks": np.ones((2, 3, 16), np.uint8), "_scales": np.ones((2, 3), np.uint8)})
    for nested in (False, True):
        state = {"shape": [2, 64], "blocksize": 64, **({"nested_blocksize": 256, "nested_offset": 0.125} if nested else {})}
        scales = np.ones(2, np.uint8 if nested else np.float32)
        table = np.array([sign * value for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3)], np.float32)
        add({
            ".weight": np.ones((64, 1), np.uint8), ".weight.absmax": scales, ".weight.nested_absmax": np.ones(1, np.float32),
            ".weight.quant_map": table / np.float32(12), ".weight.nested_quant_map": np.ones(256, np.float32),
            ".weight.quant_state.bitsandbytes__fp4": np.frombuffer(json.dumps(state).encode(), np.uint8),
        })  # fmt: skip
    return seeds


SEEDS = {"safetensors": (safetensors_seeds, SECONDS), "gguf": (gguf_seeds, SECONDS), "joined": (joined_seeds, SECONDS)}
"""The seeds of a target, and the seconds that it runs."""


@pytest.mark.parametrize("kind", SEEDS)
def test_fuzz(kind: str, tmp_path: Path) -> None:
    clang = shutil.which(os.environ.get("CLANG", "clang"))
    if not clang:
        pytest.skip("no clang, which has the libFuzzer that this needs")
    program, corpus = tmp_path / "fuzz", tmp_path / "corpus"
    probe = tmp_path / "probe.c"
    probe.write_text("int LLVMFuzzerTestOneInput(const char *d, unsigned long n);\n"
                     "int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return n && *d == 0 ? 0 : 0; }\n")
    if subprocess.run([clang, "-fsanitize=fuzzer,address", probe, "-o", program], capture_output=True).returncode:
        pytest.skip("this clang comes without libFuzzer (Debian: libclang-rt-14-dev)")
    sources = [ROOT / f"tests/c/fuzz_{kind}.c", *SOURCES, *(JOINING if kind == "joined" else [])]
    built = subprocess.run([clang, *FLAGS, *sources, "-lm", "-o", program], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    corpus.mkdir()
    make_seeds, seconds = SEEDS[kind]
    for number, seed in enumerate(make_seeds()):
        (corpus / f"seed{number}").write_bytes(seed)
    options = [f"-max_total_time={seconds}", "-max_len=4096", "-timeout=10", "-rss_limit_mb=2048", "-verbosity=1",
               "-print_final_stats=1", f"-artifact_prefix={tmp_path}/"]
    # A process inherits the peak memory of its parent, and libFuzzer would count it. A shell as the parent has little.
    command = ["sh", "-c", '"$@"; exit $?', "sh", program, *options, corpus]
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120)
    assert result.returncode == 0, result.stderr[-6000:]
    executed = int(result.stderr.split("stat::number_of_executed_units:")[1].split()[0])
    assert executed > 1000, f"only {executed} inputs in {seconds} s"


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_seeds_are_good_files(kind: str, tmp_path: Path) -> None:
    from llmpy import _core

    for number, seed in enumerate(SEEDS[kind][0]()):
        path = tmp_path / str(number)
        path.write_bytes(seed)
        assert _core.Checkpoint([str(path)]).format == kind


def test_seeds_are_joined(tmp_path: Path) -> None:
    from llmpy import _core

    for number, seed in enumerate(joined_seeds()):
        path = tmp_path / str(number)
        path.write_bytes(seed[1:])
        scheme = SCHEMES[seed[0]]
        types = {dtype for dtype, _, _ in _core.Checkpoint([str(path)], scheme=scheme).tensors().values()}
        assert types & {"int4_g32", "int4_g128", "int8_g32", "int8_g128", "fp8", "mxfp4", "fp4", "table4"}
