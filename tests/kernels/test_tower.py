"""The operations of towers, and splice, against NumPy; what is beside the rows stays."""

import numpy as np
import pytest


def rows_of(n, width, seed=0):
    return np.random.default_rng(seed).standard_normal((n, width)).astype(np.float32)


@pytest.mark.parametrize(("n_rows", "n", "n_frames"), [(1, 196, 1), (7, 256, 2), (5, 9, 1)])
def test_pixels(n_rows, n, n_frames, open_backend) -> None:
    random = np.random.default_rng(n)
    bytes_, table = random.integers(0, 256, (n_rows, 3, n), dtype=np.uint8), rows_of(3, 256)
    guarded = np.full((n_rows, 3 * n_frames * n + 3), np.nan, np.float32)
    open_backend().pixels(bytes_.reshape(n_rows, -1), table, guarded[:, : 3 * n_frames * n], n_frames)
    wanted = np.stack([table[c][bytes_[:, c]] for c in range(3)], 1)[:, :, None].repeat(n_frames, 2)
    assert np.array_equal(guarded[:, : 3 * n_frames * n], wanted.reshape(n_rows, -1)) and np.isnan(guarded[:, -3:]).all()


@pytest.mark.parametrize(("n_taps", "width"), [(1, 32), (4, 45), (16, 1152)])
def test_embed_taps(n_taps, width, open_backend) -> None:
    table, weights = rows_of(11, width), rows_of(6, n_taps, 1)
    taps = np.random.default_rng(2).integers(0, 11, (6, n_taps), dtype=np.int32)
    out, alone = np.full((6, width), np.nan, np.float32), np.full((1, width), np.nan, np.float32)
    backend = open_backend()
    backend.embed_taps(table, taps, weights, out)
    assert np.abs(out - (weights[..., None] * table[taps]).sum(1)).max() < 1e-5
    backend.embed_taps(table, taps[3:4], weights[3:4], alone)
    assert alone.tobytes() == out[3:4].tobytes()
    ones = np.ones((6, 1), np.float32)
    backend.embed_taps(table, np.ascontiguousarray(taps[:, :1]), ones, out)
    assert np.array_equal(out, table[taps[:, 0]])


@pytest.mark.parametrize("width", [1, 40, 1152])
def test_rows_are_selected_and_placed(width, open_backend) -> None:
    x, others, backend = rows_of(5, width), rows_of(3, width, 1), open_backend()
    out = np.full((8, width), np.nan, np.float32)
    backend.select(x, np.int32([4, -1, 0, 0, -2, 3, 1, -4]), out, others.reshape(-1))
    assert np.array_equal(out, np.stack([x[4], 0 * x[0], x[0], x[0], others[0], x[3], x[1], others[2]]))
    pool = np.full((9, width), np.nan, np.float32)
    backend.place_rows(x, np.int32([8, 0, 3, 4, 1]), pool)
    assert np.array_equal(pool[[8, 0, 3, 4, 1]], x) and np.isnan(pool[[2, 5, 6, 7]]).all()


@pytest.mark.parametrize("is_sum", [False, True])
def test_splice(is_sum, open_backend) -> None:
    x, features = rows_of(6, 72), rows_of(4, 72, 1)
    visual = np.int32([-1, 2, -1, 0, 3, -1])
    wanted = x.copy()
    wanted[visual >= 0] = features[visual[visual >= 0]] + (wanted[visual >= 0] if is_sum else 0)
    open_backend().splice(x, visual, features, is_sum)
    assert np.array_equal(x, wanted)


@pytest.mark.parametrize("n", [1, 4, 16])
def test_mean_rows(n, open_backend) -> None:
    x, out, alone = rows_of(3 * n, 50), np.full((3, 50), np.nan, np.float32), np.full((1, 50), np.nan, np.float32)
    backend = open_backend()
    backend.mean_rows(x, out, n)
    assert np.abs(out - x.reshape(3, n, 50).mean(1)).max() < 1e-6
    backend.mean_rows(x[n : 2 * n], alone, n)
    assert alone.tobytes() == out[1:2].tobytes()


def test_quick_gelu(open_backend) -> None:
    x = rows_of(3, 77)
    out = np.full_like(x, np.nan)
    open_backend().act(x, out, 11)
    assert np.abs(out - x / (1 + np.exp(-1.702 * x))).max() < 1e-6
