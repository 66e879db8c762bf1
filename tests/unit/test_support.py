"""The page of support: it is current, and it shows what is missing."""

from pathlib import Path
from types import ModuleType

import pytest
from modules import load

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script() -> ModuleType:
    return load(ROOT / "benchmarks/support.py")


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    assert script.page() == script.PAGE.read_text(), "run python benchmarks/support.py"


def test_an_operation_that_a_backend_lacks(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts is taken out of CUDA's table, so mixtures do not run there; a composed entry does no harm."""
    assert script.operations()["experts"] == "experts" and script.entries()["route"] == ("ENTRY", "composed")
    table = script.BACKENDS["cuda"].read_text().replace("#define ENTRY(name) b.name = cuda_##name;", "b.embed = cuda_embed;")
    (tmp_path / "cuda.cu").write_text(table)
    monkeypatch.setitem(script.BACKENDS, "cuda", tmp_path / "cuda.cu")
    monkeypatch.setattr(script, "programs", lambda: {
        "plain": (["LlamaForCausalLM"], {"embed"}), "mixture": (["MixtralForCausalLM"], {"embed", "route", "experts"}),
    })  # fmt: skip
    rows = {title: cells for title, *cells in script.families()}
    assert rows["plain"][1:4] == ["1", "yes", "yes"]
    assert rows["mixture"][0] == "experts, route" and rows["mixture"][2:4] == ["yes", "no: experts"]
    assert "<td class=no>no: experts</td>" in script.table(["a"], [["no: experts"]])


def test_types_of_the_cpu_are_those_of_its_table(script: ModuleType) -> None:
    """What the preprocessor shows is what the built core says."""
    from binding import Backend

    backend = Backend("cpu")
    for isa in ("avx2", "avx512"):
        shown = script.cpu_arithmetics(isa)
        assert all(backend.supports(name) for name in shown) and len(shown) > 25
    assert script.cpu_arithmetics("avx512")["bf16"] == ["bf16", "float"]
    assert script.cpu_arithmetics("avx2")["q4_0"] == ["float", "int8"]


def test_failed_results_are_not_shown_as_seen(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"device": "D", "command": "benchmarks/tiers.py", "row": "host cache", "value": "1", "unit": "ms"}
    older, broken = {**row, "date": "2026-01-01", "commit": "a"}, {**row, "date": "2026-01-02", "commit": "b"}
    for unit in ("passed, 2 failed", "errors"):
        monkeypatch.setattr(script, "results", lambda unit=unit: (older, {**broken, "unit": unit}))
        assert script.seen() == [["the cache in host memory", "D", "2026-01-01", "a", "benchmarks/tiers.py"]]
    monkeypatch.setattr(script, "results", lambda: (older, {**broken, "unit": "errors", "value": "0"}))
    assert script.seen()[0][3] == "b"
