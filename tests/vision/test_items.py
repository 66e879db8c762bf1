"""Positions of prompts with images."""

import numpy as np

from llmpy.vision.items import Grid, ImageItem, Piece, PlacedItem, rope_positions


def placed(first: int, rows: int, cols: int) -> PlacedItem:
    n_patches = rows * cols
    data = np.zeros((n_patches, 12), np.uint8)
    item = ImageItem(data, Grid(1, rows, cols), (Piece(n_patches, n_patches // 4),), bytes(16), n_patches // 4)
    return PlacedItem(item, first, n_patches // 4)


def test_text_counts_and_images_have_rows_and_columns() -> None:
    positions, delta = rope_positions(13, [placed(2, 4, 6), placed(9, 2, 4)], 2)
    time, row, col = positions.tolist()
    assert time == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8, 9]
    assert row == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 8, 9]
    assert col == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9]
    assert delta == 10 - 13


def test_a_text_has_its_own_positions() -> None:
    positions, delta = rope_positions(5, [], 2)
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert delta == 0
