"""The loss of every quantisation scheme on the demo model is that of the table in docs/use/quantization.md."""

import re
from pathlib import Path

import pytest
from modules import load

pytest.importorskip("gguf")
loss = load(Path(__file__).parents[2] / "benchmarks/loss.py")
ROUNDING = 0.06
"""Of a number with two digits: at most 5 % when written, and 1 % for instruction sets that sum in another order."""


@pytest.mark.usefixtures("demo_model")
def test_table(tmp_path: Path) -> None:
    shown = re.findall(r"^\| (.+) \| (\S+) \| (\S+) \| (\S+) \|$", loss.PAGE.read_text().split(loss.MARKS[0])[1], re.MULTILINE)
    wanted = {scheme: [float(cell) for cell in cells] for scheme, *cells in shown if scheme in loss.SCHEMES}
    assert tuple(wanted) == loss.SCHEMES
    for scheme, found in loss.measure_all(tmp_path).items():
        assert [found.mean, found.largest, found.kl] == pytest.approx(wanted[scheme], rel=ROUNDING), scheme
