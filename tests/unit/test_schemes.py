"""The table of stored types in the guide to quantisation is current and complete."""

import re
from pathlib import Path

from modules import load

ROOT = Path(__file__).parents[2]


def test_the_table_is_up_to_date() -> None:
    script = load(ROOT / "benchmarks/schemes.py")
    text = script.PAGE.read_text()
    assert script.page(text) == text, "run python benchmarks/schemes.py"


def test_every_type_of_the_tables_has_a_row() -> None:
    """With bits and a device; types that tensor cores multiply say so."""
    script = load(ROOT / "benchmarks/schemes.py")
    rows = {name: cells for name, *cells in script.rows(script.PAGE.read_text())}
    names = re.findall(r"&linear_(\w+?)_float_avx2", (ROOT / "kernels/cpu/linear_types_avx2.c").read_text())
    assert {name.upper() for name in names} <= {*rows} and script.in_units() <= {*rows}
    assert rows["Q4_K"][0] == "4.5" and rows["Q4_K"][2].startswith("exact") and rows["TABLE4"][0] == "5"
    assert rows["FP8"][2].startswith("fp8") and rows["FP8"][5] != "-" and rows["INT4_G128"][3] != "-"
