"""The CPU backend on aarch64: built by a cross compiler, it gives AVX2's bits under qemu. qemu tells nothing of speed."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from modules import load

from llmpy import _core

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "tests/c/kernel_bits.c"
CROSS, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
compiling = load(ROOT / "csrc/compiling.py")


def build(folder: Path, machine: str, compiler: list[str], *link: str) -> Path:
    """The driver with the kernels of the first instruction set and with csrc/base, by the build's own flags."""
    parts = (ROOT / "kernels/cpu", ROOT / "csrc/base")
    units = [unit for unit in compiling.units(machine) if unit[0].parent in parts and "avx512" not in unit[2]]

    def compile_file(unit: tuple[Path, list[str], str]) -> Path:
        source, extra, name = unit
        command = [*compiler, *compiling.flags(), "-Werror", *extra, "-c", source, "-o", folder / name]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return folder / name

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_file, [*units, (DRIVER, [], "driver.o")]))
    program = folder / "kernel_bits"
    subprocess.run([*compiler, *objects, *link, "-pthread", "-lm", "-o", program], check=True)
    return program


@pytest.mark.slow
def test_neon_has_the_bits_of_avx2(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every operation; linears, mixtures and products of heads with every type of weights."""
    for tool in (CROSS, QEMU):
        if not shutil.which(tool):
            pytest.skip(f"no {tool}")
    if "avx2" not in _core.cpu_isas():
        pytest.skip("the processor has no AVX2")
    cross = build(tmp_path_factory.mktemp("aarch64"), "aarch64", [CROSS], "-static")
    native = build(tmp_path_factory.mktemp("x86"), "x86_64", compiling.CC)
    wanted = subprocess.run([native, "avx2"], capture_output=True, text=True, check=True).stdout.splitlines()
    found = subprocess.run([QEMU, cross, "neon"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [(a, b) for a, b in zip(found, wanted, strict=True) if a != b] == []
    assert len(set(wanted)) > 530
