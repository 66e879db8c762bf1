"""The table of benchmarks/wide_ep.py, and that its parts grow with what they should grow with."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/wide_ep.py"
ROWS = [
    "| 8, 256, NVLink | 249 / 306 / 23 / 41 | 37.8 / 33.9 | 3,390 / 3,780 | 137 |",
    "| 64, 288, 400 Gb/s | 249 / 75 / 181 / 336 | 51.3 / 31.5 | 2,490 / 4,060 | 68 |",
    "| 1,000, 1,024, 400 Gb/s | 249 / 75 / 219 / 397 | 57.3 / 37.6 | 2,230 / 3,410 | 61 |",
]


@pytest.fixture(scope="module")
def wide_ep() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wide_ep", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["wide_ep"] = module
    spec.loader.exec_module(module)
    return module


def test_the_table(wide_ep: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["wide_ep.py"])
    wide_ep.main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[2:5] == ROWS
    assert printed[6] == "A layer dispatches 7.6 MB and combines 14.7 MB a device."


def test_the_shape_has_the_models_parameters(wide_ep: ModuleType) -> None:
    shape = wide_ep.DEEPSEEK_V3
    mixtures = (shape.layers - shape.dense) * (shape.experts + shape.shared) * shape.expert_bytes
    dense = shape.dense * 3 * shape.hidden * shape.dense_width
    total = shape.layers * shape.attention_bytes + mixtures + dense + shape.logits_bytes  # bf16: two matrices of one byte
    assert round(total / 1e9) == 671


def test_what_each_part_depends_on(wide_ep: ModuleType) -> None:
    def layer(**changes: object) -> object:
        given = {"devices": 64, "physical": 288, "sequences": 128, "context": 4096, "link": wide_ep.RDMA_64} | changes
        return wide_ep.layer_of(wide_ep.DEEPSEEK_V3, wide_ep.H200, **given)

    base = layer()
    longer, more, fast = layer(context=8192), layer(sequences=256), layer(link=replace(wide_ep.RDMA_64, bytes_per_s=90e9))
    assert longer.attention_us > 1.8 * base.attention_us and longer.experts_us == base.experts_us
    assert longer.dispatch_bytes == base.dispatch_bytes
    assert more.dispatch_bytes == 2 * base.dispatch_bytes and more.experts_us == 2 * base.experts_us
    assert fast.combine_us - 15 == pytest.approx((base.combine_us - 15) / 2)
    assert base.overlapped_us == base.dispatch_us + base.combine_us < base.serial_us
    few = layer(devices=8, physical=256, link=wide_ep.NVLINK)
    assert few.overlapped_us == few.attention_us + few.experts_us and few.experts_us > 4 * base.experts_us
    assert layer(devices=1).dispatch_us == 15  # nothing leaves the device
