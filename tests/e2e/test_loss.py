"""The loss of every quantisation scheme on the demo model is that of the table in docs/use/quantization.md."""

import re
from pathlib import Path

import pytest
from modules import load

pytest.importorskip("gguf")
loss = load(Path(__file__).parents[2] / "benchmarks/loss.py")
ROUNDING = 0.06
"""Of a number with two digits: at most 5 % when written, and 1 % for instruction sets that sum in another order."""
PERPLEXITY = 0.01
LARGEST = 0.2
"""Of the largest difference, which is that of one token: a cache of int8 has 0.2 with AVX-512 and 0.166 with AVX2."""


NEAREST = {"int4_g32": ("GGUF Q4_1", 1.0), "int4": ("GGUF Q4_0", 1.41), "int8": ("GGUF Q8_0", 1.8)}
"""Of llama.cpp's nearest type: its name, and the factor of its KL that a scheme may have. A quarter of a bit is 1.41."""


@pytest.mark.slow
@pytest.mark.usefixtures("demo_model")
def test_nearest_types(tmp_path: Path) -> None:
    """Against weights that lie on no grid, as those of the demo model's file do."""
    names = [name for scheme, (nearest, _) in NEAREST.items() for name in (scheme, nearest)]
    found = loss.measure_all(tmp_path, names, has_noise=True)
    for scheme, (nearest, factor) in NEAREST.items():
        assert found[scheme].kl <= factor * found[nearest].kl, scheme


@pytest.mark.usefixtures("demo_model")
def test_table(tmp_path: Path) -> None:
    shown = re.findall(r"^\| (.+)" + 4 * r" \| (\S+)" + r" \|$", loss.PAGE.read_text().split(loss.MARKS[0])[1], re.MULTILINE)
    wanted = {scheme: [float(cell) for cell in cells] for scheme, *cells in shown if scheme in loss.SCHEMES}
    assert tuple(wanted) == loss.SCHEMES
    for scheme, found in loss.measure_all(tmp_path).items():
        perplexity, mean, largest, kl = wanted[scheme]
        assert found.perplexity == pytest.approx(perplexity, rel=PERPLEXITY), scheme
        assert [found.mean, found.kl] == pytest.approx([mean, kl], rel=ROUNDING), scheme
        assert found.largest == pytest.approx(largest, rel=LARGEST), scheme
