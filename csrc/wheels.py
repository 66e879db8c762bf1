"""Makes what a release consists of: the source archive, the wheel of llmpy and, where there is nvcc, that of llmpy-cu13.

    pip install "setuptools>=77" numpy ziglang auditwheel
    python csrc/wheels.py --out dist

The wheels are built from the source archive, so it is complete. ziglang links them for an old glibc, so no container is needed.
They are for the processor of the C compiler: CC=aarch64-linux-gnu-gcc makes that of llmpy for aarch64. A wheel over its budget
of bytes, or one that auditwheel finds to need a newer glibc, fails.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.util import find_spec
from pathlib import Path

import compiling

ROOT = Path(__file__).absolute().parents[1]

GLIBC = "2.28"
BUDGETS = {"llmpy": 4_000_000, "llmpy_cu13": 30_000_000}
"""Bytes of each wheel."""


def run(*words: object, cwd: Path, **variables: str) -> str:
    """Runs Python with some words; what it printed."""
    environment = {**os.environ, "PYTHONPATH": "", **variables}
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"wheels: failed: {' '.join(map(str, words))}")
    return done.stdout


def unpack_archive(out: Path, folder: Path) -> Path:
    """Makes the source archive and unpacks it into a folder; the unpacked one."""
    run("setup.py", "-q", "egg_info", "--egg-base", folder, "sdist", "--dist-dir", out, cwd=ROOT)
    archive = max(out.glob("llmpy-*.tar.gz"), key=lambda path: path.stat().st_mtime)
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def check(wheel: Path, glibc: str) -> None:
    """Ends if a wheel is too large, or needs more of a machine than its name says."""
    size, budget = wheel.stat().st_size, BUDGETS[wheel.name.split("-")[0]]
    print(f"{wheel.name}: {size / 1e6:.2f} MB")
    if size > budget:
        raise SystemExit(f"wheels: {wheel.name}: wanted at most {budget} bytes, have {size}")
    if not glibc or find_spec("auditwheel") is None:
        print("wheels: auditwheel did not look at it")
        return
    said = run("-m", "auditwheel", "show", wheel, cwd=wheel.parent)
    tag = f"manylinux_{glibc.replace('.', '_')}_{compiling.machine()}"
    policies = [word.strip('",.') for word in said.split() if word.startswith('"manylinux_')]
    if not policies or [int(part) for part in policies[0].split("_")[1:3]] > [int(part) for part in glibc.split(".")]:
        raise SystemExit(f"wheels: {wheel.name}: wanted {tag}; auditwheel says:\n{said}")
    print(f"  auditwheel: {policies[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files (dist)")
    parser.add_argument("--glibc", default=GLIBC, help=f"the oldest glibc that shall load them ({GLIBC}); '': this machine's")
    parser.add_argument("--cuda", choices=["auto", "require", "0"], default="auto", help="whether to make llmpy-cu13")
    options = parser.parse_args()
    for name in ("setuptools", "numpy", *(["ziglang"] if options.glibc else [])):
        if find_spec(name) is None:
            raise SystemExit(f"wheels: pip install {name}")
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["LLMPY_CUDA"] = {"auto": "1"}.get(options.cuda, options.cuda)
    has_cuda = compiling.find_nvcc() is not None
    with tempfile.TemporaryDirectory() as folder:
        source = unpack_archive(out, Path(folder))
        wheel = ["setup.py", "-q", "bdist_wheel", "--dist-dir"]
        run(*wheel, Path(folder, "llmpy"), cwd=source, LLMPY_CUDA="0", LLMPY_GLIBC=options.glibc)
        if has_cuda:
            run(*wheel, Path(folder, "cuda"), cwd=source / "kernels/cuda", LLMPY_CUDA="require", LLMPY_GLIBC=options.glibc)
        for made in [*Path(folder, "llmpy").glob("*.whl"), *Path(folder, "cuda").glob("*.whl")]:
            check(made, options.glibc)
            shutil.copy2(made, out)


if __name__ == "__main__":
    main()
