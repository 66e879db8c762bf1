"""Linears of CUDA ranks that store their results to all ranks (`is_mirrored`): the bits of a linear and a gather behind it."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modules import load

from ranks import COLUMNS, view
from staging import struct

gathers = load(Path(__file__).with_name("test_gather_cuda.py"))
make_team = gathers.make_team

LEAST_ROWS = 65  # linear_gemm.cuh stores to all ranks
# rows; columns of each rank: eights, unequal, less than a tile and many tiles
CASES = [(8, (1024, 7176)), (64, (640, 3848)), (65, (648, 1400)), (130, (2048, 4104)), (300, (1024, 1032))]
K = 192


class Products:
    """A linear of each rank, whose columns lie side by side in one value."""

    def __init__(self, team: Any, form: str, n_rows: int, columns: tuple[int, ...]) -> None:
        self.team, self.form, self.n_rows, self.columns = team, form, n_rows, columns
        self.firsts, self.width = np.cumsum([0, *columns[:-1]]).tolist(), sum(columns)
        rng, kind = np.random.default_rng(n_rows), gathers.KINDS[team.dtype]
        x = rng.standard_normal((n_rows, K)).astype(kind)
        self.x = [team.new(rank, x) for rank in range(team.n)]
        self.matrices: list[Any] = []
        self.bias: list[int] = []
        self.terms: list[Any] = []
        self.mid: list[Any] = []
        for rank, n in enumerate(columns):
            rows = 2 * n if form == "product" else n
            weights = rng.standard_normal((rows, K)).astype(kind)
            self.matrices.append(team.backends[rank].matrix([(team.dtype, rows, weights)], K))
            self.bias.append(team.new(rank, rng.standard_normal(rows).astype(np.float32)))
            self.terms.append(view(team.new(rank, rng.standard_normal((n_rows, n)).astype(kind)), n, n))
            self.mid.append(view(team.buffer(rank, 4 * n_rows * n), 2 * n, 2 * n) if form == "product" else view(0, 0, 0))

    def run(self, is_mirrored: bool) -> Any:
        """Runs the linears and the gather. The place has the values of all ranks."""
        place = gathers.Place(self.team, self.n_rows, self.width, self.team.words)
        place.upload()
        for rank, (first, n) in enumerate(zip(self.firsts, self.columns, strict=True)):
            args = struct(
                "linear_args", matrix=self.matrices[rank].address, n_rows=self.n_rows, x=view(self.x[rank], K, K),
                y=place.view(rank, first, n), bias=self.bias[rank], output=int(self.form == "product"), mid=self.mid[rank],
            )  # fmt: skip
            if self.form == "sum":
                args.add = ctypes.addressof(self.terms[rank])
            assert self.mirrors(rank, args) == (self.n_rows >= LEAST_ROWS)
            args.is_mirrored = is_mirrored
            self.team.call(rank, "linear", args)
            fields = {"first": first, "n_columns": n, "unit": 8, "is_stored": is_mirrored}
            self.team.ranks.gather(rank, COLUMNS, self.n_rows, place.view(rank), **fields)
        self.team.wait()
        return place

    def mirrors(self, rank: int, args: object) -> bool:
        function = self.team.ranks.table.function("mirrors")
        return bool(function(self.team.backends[rank].ctx, ctypes.addressof(args)) & 0xFF)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", ["plain", "sum", "product"])
def test_stores_to_all_ranks(make_team: Any, form: str, dtype: str) -> None:
    team = make_team(2, dtype, 16 << 20)
    for n_rows, columns in CASES:
        products = Products(team, form, n_rows, columns)
        place = products.run(is_mirrored=False)
        wanted = place.rows(team.get(0, team.memory[0], place.before[0].shape, team.words)).copy()
        assert len(np.unique(wanted)) > 1000
        places = [place, products.run(is_mirrored=True)] if n_rows >= LEAST_ROWS else [place]
        for each in places:
            for rank in range(team.n):
                each.check(rank, wanted)
