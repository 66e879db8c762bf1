"""Runs the libFuzzer targets of the readers for a while on seeds made here (20 s each)."""

import json
import os
import shlex
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 20
FLAGS = shlex.split(
    "-std=c11 -Wall -Wextra -Werror -O1 -g -ffp-contract=off -fsanitize=fuzzer,address,undefined "
    "-fno-sanitize-recover=undefined"
)
SOURCES = [
    *(ROOT / "csrc/base" / name for name in ("dtype.c", "file.c", "json.c", "mem.c", "name_table.c", "status.c")),
    *(ROOT / "csrc/program" / name for name in ("gguf.c", "safetensors.c", "tensor_list.c")),
]


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


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
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
    built = subprocess.run(
        [clang, *FLAGS, ROOT / f"tests/c/fuzz_{kind}.c", *SOURCES, "-lm", "-o", program], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    corpus.mkdir()
    for number, seed in enumerate({"safetensors": safetensors_seeds, "gguf": gguf_seeds}[kind]()):
        (corpus / f"seed{number}").write_bytes(seed)
    options = [f"-max_total_time={SECONDS}", "-max_len=4096", "-timeout=10", "-rss_limit_mb=2048", "-verbosity=1",
               "-print_final_stats=1", f"-artifact_prefix={tmp_path}/"]
    # A process inherits the peak memory of its parent, and libFuzzer would count it. A shell as the parent has little.
    command = ["sh", "-c", '"$@"; exit $?', "sh", program, *options, corpus]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS + 120)
    assert result.returncode == 0, result.stderr[-6000:]
    executed = int(result.stderr.split("stat::number_of_executed_units:")[1].split()[0])
    assert executed > 1000, f"only {executed} inputs in {SECONDS} s"


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_seeds_are_good_files(kind: str, tmp_path: Path) -> None:
    from llmpy import _core

    for number, seed in enumerate({"safetensors": safetensors_seeds, "gguf": gguf_seeds}[kind]()):
        path = tmp_path / str(number)
        path.write_bytes(seed)
        assert _core.Checkpoint([str(path)]).format == kind
