"""Files of programs: every change is found; whatever stands in one, loading gives a program that runs or an error of ours."""

import copy
import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from modules import load

from llmpy import LLM, CheckpointError, LlmpyError, export

helpers = load(Path(__file__).with_name("conftest.py"))

WRONG = [
    None, True, -1, 0, 1, 3, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**30, 10**400, -(2**31), 0.5, 1e300, float("nan"),
    float("inf"), "", "x", "00" * 4, [], [1], [[1]], {}, {"a": 1},
]  # fmt: skip


def spots(x: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values of a file."""
    for key in x if isinstance(x, dict) else range(len(x)) if isinstance(x, list) else ():
        yield (*path, key)
        yield from spots(x[key], (*path, key))


def changed(contents: Any, path: tuple[Any, ...], rng: random.Random) -> Any:
    """The contents of a file with another value, or without it."""
    found = copy.deepcopy(contents)
    holder = found
    for key in path[:-1]:
        holder = holder[key]
    old = holder[path[-1]]
    near = [old + step for step in (-2, -1, 1, 16)] if isinstance(old, int) else [old[:-2]] if isinstance(old, str) else []
    new = rng.choice([rng.choice(WRONG), rng.choice([*near, "gone"])])
    if new == "gone":
        del holder[path[-1]]
    else:
        holder[path[-1]] = new
    return found


MANY = [pytest.param(kind, 1500, marks=pytest.mark.slow) for kind in ("helium", "minimax_m2")]


@pytest.mark.parametrize(("kind", "n"), [("helium", 60), *MANY])
def test_a_wrong_value_is_an_error_of_ours_or_harmless(kind, n, converted, tmp_path) -> None:
    found = converted(kind)
    good = json.loads(found.program.read_text())
    digest = good.pop("digest")
    assert digest == export.stored.digest_of(good)
    by_field: dict[str, list[tuple[Any, ...]]] = {}
    for path in spots(good):
        if path[0] not in ("config_key", "made_by"):
            by_field.setdefault(path[0], []).append(path)
    rng, refused, file = random.Random(n), 0, tmp_path / "program.json"
    for _ in range(n):
        bad = changed(good, rng.choice(by_field[rng.choice([*by_field])]), rng)
        file.write_text(json.dumps(bad))
        try:
            with LLM(found.path, program=file, **helpers.OPTIONS) as llm:
                assert len(llm.generate([[1, 2, 3]], max_tokens=2, temperature=0, ignore_eos=True)[0].outputs[0].token_ids) == 2
        except LlmpyError as error:
            refused += bool(str(error))
        if bad != good:
            file.write_text(json.dumps({**bad, "digest": digest}))
            with pytest.raises(LlmpyError):
                export.stored.read(file)
    assert refused > n // 2


def test_a_cut_file_is_damaged(converted, tmp_path) -> None:
    found = converted("helium")
    text, file = found.program.read_text(), tmp_path / "program.json"
    for n in range(0, len(text), len(text) // 40):
        file.write_text(text[:n])
        with pytest.raises(CheckpointError, match="it is no converted program"):
            LLM(found.path, program=file, **helpers.OPTIONS)
    for deep in ("[" * 100_000, '{"a":' * 100_000, "\0" * 50, '{"format": 1, "values": 1e999}'):
        file.write_text(deep)
        with pytest.raises(CheckpointError, match="it is no converted program"):
            LLM(found.path, program=file, **helpers.OPTIONS)
    file.write_bytes(b"\xff\xfe" + text.encode()[:9])
    with pytest.raises(CheckpointError, match="it is no converted program"):
        LLM(found.path, program=file, **helpers.OPTIONS)
    with file.open("wb") as sparse:
        sparse.truncate(export.stored.LARGEST + 1)
    with pytest.raises(CheckpointError, match=f"wanted a program of at most {export.stored.LARGEST} bytes"):
        LLM(found.path, program=file, **helpers.OPTIONS)


def test_an_operation_that_reads_what_comes_later(converted, tmp_path) -> None:
    """A program is a list, so a cycle is a value that is read before it is written."""
    found = converted("helium")
    good = json.loads(found.program.read_text())
    del good["digest"]
    operations = good["operations"]
    later = operations[-1][1]["in"][0]
    norm = next(operands for name, operands in operations if name == "rms_norm")
    assert later != norm["in"][0]
    norm["in"] = [later]
    (tmp_path / "cycle.json").write_text(json.dumps(good))
    with pytest.raises(CheckpointError, match=r"cycle.json: it is no program that can run: operation 1 \(rms_norm\)"):
        LLM(found.path, program=tmp_path / "cycle.json", **helpers.OPTIONS)


def test_two_that_convert_at_once_leave_one_file(converted, monkeypatch, tmp_path) -> None:
    found = converted("helium")
    contents = json.loads(found.program.read_text())
    monkeypatch.setenv("LLMPY_CACHE_DIR", str(tmp_path))
    both = threading.Barrier(2, timeout=30)

    def slowly(raw: object) -> object:
        both.wait()
        return contents

    monkeypatch.setattr(export, "converted", slowly)
    made: list[object] = []
    threads = [threading.Thread(target=lambda: made.append(export.find(found.raw, "config.json"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2 and [each.suffix for each in (tmp_path / "programs").iterdir()] == [".json"]


TWICE = """
import json, sys
from llmpy import export
export.find(json.load(open(sys.argv[1])), sys.argv[1])
"""


@pytest.mark.slow
def test_two_processes_convert_at_once(made, monkeypatch, tmp_path) -> None:
    found = made("helium")
    monkeypatch.setenv("LLMPY_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", TWICE, str(found.path / "config.json")]
    children = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [(child.communicate()[1][-500:], child.returncode) for child in children] == [("", 0), ("", 0)]
    (file,) = (tmp_path / "programs").iterdir()
    assert export.stored.read(file)
