"""The loss of every quantisation scheme on the demo model is that of the table in docs/use/quantization.md."""

import re
from pathlib import Path

import pytest
from modules import load

pytest.importorskip("gguf")
loss = load(Path(__file__).parents[2] / "benchmarks/loss.py")
ROUNDING = 0.05
"""Of a number when it is written with two digits, at most. The instruction set is fixed, so nothing else differs."""
PERPLEXITY = 0.001
"""The same for four digits, with room."""

NEAREST = {"int4_g32": ("q4_1", 1.05), "int4": ("q4_0", 1.41), "int8": ("q8_0", 1.8)}
"""Of llama.cpp's nearest type: its name, and the factor of its KL that a scheme may have. A quarter of a bit is 1.41; the
squared error of groups of 128 is 1.5 times that of groups of 32, and means over four references still differ by 20 %."""


@pytest.mark.slow
@pytest.mark.usefixtures("demo_model")
def test_nearest_types(tmp_path: Path) -> None:
    """The mean over four references. `q8_0`, `q4_1` and `q4_0` have the bits of llama.cpp's types (test_quantise_gguf.py)."""
    found = loss.measure_all(tmp_path, [*NEAREST, *(nearest for nearest, _ in NEAREST.values())], 4)
    for scheme, (nearest, factor) in NEAREST.items():
        assert found[scheme].kl <= factor * found[nearest].kl, scheme


@pytest.mark.usefixtures("demo_model")
def test_table(tmp_path: Path) -> None:
    page = loss.PAGE.read_text().split(loss.MARKS[0])[1]
    shown = re.findall(r"^\| (.+?) \| \S+" + 4 * r" \| (\S+)" + r" \|$", page, re.MULTILINE)
    wanted = {scheme: [float(cell) for cell in cells] for scheme, *cells in shown if scheme in loss.SCHEMES}
    assert tuple(wanted) == loss.SCHEMES
    for scheme, found in loss.measure_all(tmp_path).items():
        perplexity, *others = wanted[scheme]
        assert found.perplexity == pytest.approx(perplexity, rel=PERPLEXITY), scheme
        assert [found.mean, found.largest, found.kl] == pytest.approx(others, rel=ROUNDING), scheme
