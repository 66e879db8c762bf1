"""The sampler against a plain float64 reference, its bits in every batch, the distribution of its samples."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from binding import Backend
from llmpy import hardware

Array = np.ndarray
Open = Callable[..., Backend]
RAW, FULL, PROCESSED = 0, 1, 2
ID, STATUS, RAW_VALUE, FULL_VALUE, PROCESSED_VALUE, MASS, RANK, TOP = range(8)


def sampler(open_backend: Open, vocab: int, threads: int = 1) -> Backend:
    return open_backend(threads, vocab_size=vocab)


def sample(backend: Backend, logits: Array, tasks: list[dict[str, Any]], **kwargs: Any) -> list[tuple[Any, ...]]:
    before = logits.tobytes()
    results = backend.sample(logits, tasks, **kwargs)
    assert backend.allocations == 0
    assert logits.tobytes() == before
    return results


def log_softmax(z: Array) -> Array:
    top = z.max()
    return z - top - np.log(np.exp(z - top).sum())


def mask_of(ids: list[int] | Array, vocab: int) -> list[int]:
    """Words of a mask that allows some ids, as the sampler takes them."""
    bits = np.zeros(-(-vocab // 32) * 32, bool)
    bits[ids] = True
    return [int(word) for word in np.packbits(bits, bitorder="little").view(np.int32)]


def reference(logits: Array, task: dict[str, Any], limit: int = 0, banned: Array | None = None) -> dict[str, Any]:
    """Steps 1 to 8 in float64: raw, full and processed values of every id, the kept ids, and the distance to the cuts."""
    z = logits.astype(np.float64)
    raw = log_softmax(z)
    for token, value in task.get("bias", []):
        if value > -np.inf:
            z[token] += value
    repetition = task.get("repetition_penalty", 1.0)
    for token, count, in_prompt in task.get("seen", []):
        if count or in_prompt:
            z[token] = z[token] / repetition if z[token] > 0 else z[token] * repetition
        if count:
            z[token] -= task.get("frequency_penalty", 0.0) * count + task.get("presence_penalty", 0.0)
    z = z / task.get("temperature", 1.0)
    full = log_softmax(z)
    gone = np.zeros(len(z), bool)
    gone[limit or len(z) :] = True
    gone[[] if banned is None else banned] = True
    gone[task.get("banned", [])] = True
    gone[[token for token, value in task.get("bias", []) if value == -np.inf]] = True
    if task.get("allowed"):
        gone |= ~np.isin(np.arange(len(z)), task["allowed"])
    if task.get("mask"):
        gone |= ~np.unpackbits(np.array(task["mask"], np.int32).view(np.uint8), bitorder="little")[: len(z)].astype(bool)
    kept, margin = ~gone & (z > -np.inf), np.inf
    if not kept.any():
        return {"raw": raw, "full": full, "kept": kept, "margin": margin}
    if not task.get("is_greedy"):
        p = np.where(kept, np.exp(z - z[kept].max()), 0)
        if task.get("min_p", 0) > 0:
            margin = min(margin, np.abs(p / task["min_p"] - 1).min())
            kept &= p >= task["min_p"]
        if 0 < task.get("top_k", 0) < kept.sum():
            kept &= z >= np.sort(z[kept])[-task["top_k"]]
        if task.get("top_p", 1) < 1:
            p = np.where(kept, p, 0) / p[kept].sum()
            values, at = np.unique(-z[kept], return_inverse=True)
            mass = np.cumsum(np.bincount(at, p[kept]))
            margin = min(margin, np.abs(mass - task["top_p"]).min())
            kept &= z >= -values[np.argmax(mass >= task["top_p"])]
    processed = np.where(kept, log_softmax(np.where(kept, z, -np.inf)), -np.inf)
    return {"raw": raw, "full": full, "processed": processed, "kept": kept, "margin": margin, "z": z}


def check(result: tuple[Any, ...], want: dict[str, Any], task: dict[str, Any], tolerance: float = 4e-6) -> None:
    """Checks values, mass, rank and alternatives of one result; ties and order follow the reference's values."""
    token = result[ID]
    for key, at in (("raw", RAW_VALUE), ("full", FULL_VALUE), ("processed", PROCESSED_VALUE)):
        if want[key][token] == -np.inf:
            assert result[at] == -np.inf
        else:
            assert abs(result[at] - want[key][token]) <= tolerance * max(1, abs(want[key][token]) / 8)
            assert result[at] <= 0
    mass = np.exp(want["full"][want["kept"]]).sum()
    assert abs(result[MASS] - mass) <= 3e-6 and result[MASS] <= 1
    values = want[("raw", "full", "processed")[task.get("mode", RAW)]]
    assert result[RANK] == 1 + (values > values[token]).sum()
    finite = np.flatnonzero(values > -np.inf)
    order = finite[np.lexsort((finite, -values[finite]))][: task.get("n_top", 0)]
    top = result[TOP]
    assert [t[0] for t in top] == [*order, *[len(values)] * (task.get("n_top", 0) - len(order))]
    for place, (i, value, rank) in enumerate(top):
        if place < len(order):
            assert abs(value - values[i]) <= tolerance * max(1, abs(values[i]) / 8)
            assert rank == 1 + (values > values[i]).sum()
        else:
            assert value == -np.inf


def coarse(seed: int, n: int, scale: float = 2.0) -> Array:
    """Logits in steps of 1/8, so that ties are many and exact in both precisions."""
    return (np.round(np.random.default_rng(seed).standard_normal(n) * scale * 8) / 8).astype(np.float32)


@pytest.mark.parametrize("vocab", [1, 2, 7, 16, 33, 100])
def test_every_truncation_of_small_vocabularies(vocab: int, open_backend: Open) -> None:
    backend = sampler(open_backend, vocab)
    n_checked = 0
    for seed, temperature in enumerate((1.0, 0.5, 2.0)):
        logits = coarse(seed, vocab)[None]
        tasks = [
            {"wants_logprobs": 1, "temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p,
             "mode": mode, "n_top": 5, "seed": seed, "position": position}
            for position, (min_p, top_k, top_p, mode) in enumerate(itertools.product(
                (0.0, 0.013, 0.3, 1.0), (0, 1, 2, 5, 40), (1.0, 0.999, 0.61, 0.23, 1e-6), (RAW, FULL, PROCESSED)))
        ]  # fmt: skip
        for task, result in zip(tasks, sample(backend, logits, tasks), strict=True):
            want = reference(logits[0], task)
            if want["margin"] < 1e-5:  # a cut that rounding decides
                continue
            n_checked += 1
            assert want["kept"][result[ID]]
            check(result, want, task)
    assert n_checked > 600


@pytest.mark.parametrize("vocab", [50, 4096, 4097, 9000])
def test_edits_and_removals(vocab: int, open_backend: Open) -> None:
    rng = np.random.default_rng(vocab)
    backend = sampler(open_backend, vocab)
    for seed in range(25):
        logits = coarse(seed, vocab, 3.0)[None]
        ids = rng.permutation(vocab)
        task: dict[str, Any] = {
            "wants_logprobs": 1, "seed": seed, "position": 9, "n_top": 4, "mode": int(rng.integers(3)),
            "temperature": float(rng.choice([1.0, 0.5, 4.0])), "is_greedy": int(rng.random() < 0.3),
            "bias": [(int(i), float(rng.choice([-np.inf, 2.5, -3.0]))) for i in ids[:6]],
            "seen": [(int(i), int(rng.integers(3)), int(rng.integers(2))) for i in ids[3:20]],
            "repetition_penalty": float(rng.choice([1.0, 2.0, 0.5])), "presence_penalty": float(rng.choice([0.0, 0.5])),
            "frequency_penalty": float(rng.choice([0.0, -0.25])), "banned": [int(i) for i in ids[15:18]],
        }  # fmt: skip
        if task["is_greedy"]:
            task["temperature"] = 1.0
        if rng.random() < 0.3:
            task["allowed"] = sorted(int(i) for i in ids[10 : 10 + vocab // 3])
        if rng.random() < 0.6:
            task["mask"] = mask_of(ids[: vocab // int(rng.choice([2, 7, 40]))], vocab)
        if rng.random() < 0.5:
            task["top_p"], task["top_k"] = 0.83, 17
        banned, limit = ids[18:21].astype(np.int32), int(vocab * rng.choice([1.0, 0.7]))
        want = reference(logits[0], task, limit, banned)
        if want["margin"] < 1e-5:
            continue
        result = sample(backend, logits, [task], vocab_limit=limit, banned=banned)[0]
        if not want["kept"].any():
            assert result[STATUS] == 2
            continue
        assert result[STATUS] == 0 and want["kept"][result[ID]]
        check(result, want, task)
        if task["is_greedy"]:
            assert result[ID] == np.flatnonzero(want["kept"])[want["z"][want["kept"]].argmax()]
            quiet = sample(backend, logits, [task | {"wants_logprobs": 0}], vocab_limit=limit, banned=banned)[0]
            assert quiet[ID] == result[ID]


def test_large_vocabulary_against_reference(open_backend: Open) -> None:
    vocab = 152_064
    rng = np.random.default_rng(3)
    logits = np.stack([rng.standard_normal(vocab) * 3, rng.standard_normal(vocab) * 0.01, rng.gumbel(size=vocab) * 2])
    logits[2] -= 100
    logits = logits.astype(np.float32)
    backend = sampler(open_backend, vocab, 2)
    settings = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 1000, "top_p": 0.5}, {"top_k": 100_000}]
    tasks = [
        {
            "logits_row": row,
            "wants_logprobs": 1,
            "seed": 11,
            "position": i,
            "temperature": 0.8,
            "n_top": 8,
            "mode": i % 3,
            **more,
        }
        for row in range(3)
        for i, more in enumerate(settings)
    ]
    for task, result in zip(tasks, sample(backend, logits, tasks), strict=True):
        want = reference(logits[task["logits_row"]], task)
        # 150,000 terms and logits near 100: a value is known to about 1e-5; order is that of the logits.
        assert abs(result[RAW_VALUE] - want["raw"][result[ID]]) < 1e-5
        assert abs(result[FULL_VALUE] - want["full"][result[ID]]) < 1e-5
        mass = np.exp(want["full"][want["kept"]]).sum()
        assert abs(result[MASS] - mass) < 1e-5
        assert abs(result[PROCESSED_VALUE] - want["processed"][result[ID]]) < 2e-5
        z = logits[task["logits_row"]]
        best = np.lexsort((np.arange(vocab), -z))[:8]
        listed = [int(i) for i in best if task["mode"] != PROCESSED or want["kept"][i]]
        assert [t[0] for t in result[TOP]] == listed + [vocab] * (8 - len(listed))
        assert result[RANK] == 1 + (z > z[result[ID]]).sum()


def variants(seed: int) -> list[dict[str, Any]]:
    """Tasks of every kind."""
    return [
        {"is_greedy": 1},
        {"is_greedy": 1, "wants_logprobs": 1, "n_top": 3},
        {"wants_logprobs": 1, "seed": seed, "position": 4},
        {"wants_logprobs": 1, "seed": seed, "temperature": 0.7, "top_p": 0.9, "n_top": 2, "mode": PROCESSED},
        {"seed": seed, "temperature": 1.3, "top_k": 7, "min_p": 0.001},
        {"seed": seed, "seen": [(5, 2, 0), (9, 0, 1)], "repetition_penalty": 1.3, "wants_logprobs": 1},
        {"is_score": 1, "target": 77, "wants_logprobs": 1, "temperature": 0.7, "mode": FULL, "n_top": 5},
        {"is_score": 1, "target": 77, "wants_logprobs": 1, "top_k": 3, "mode": PROCESSED},
        {"seed": seed, "allowed": [3, 4, 5, 99], "wants_logprobs": 1},
        {"seed": seed, "mask": mask_of(np.arange(77, 3000), 9001), "wants_logprobs": 1},
        {"is_greedy": 1, "mask": mask_of([7, 8, 3900], 9001)},
        {"seed": seed, "temperature": 6.0, "top_p": 0.97},
    ]


def test_row_never_depends_on_its_batch(open_backend: Open) -> None:
    vocab, rows = 9001, 5
    logits = np.random.default_rng(1).standard_normal((rows, vocab)).astype(np.float32) * 4
    alone = {}
    for row in range(rows):
        for i, task in enumerate(variants(row)):
            alone[row, i] = sample(sampler(open_backend, vocab), logits[row : row + 1], [task | {"logits_row": 0}])[0]
    tasks = [task | {"logits_row": row} for row in range(rows) for task in variants(row)]
    for threads in (1, 2, 7):
        backend = sampler(open_backend, vocab, threads)
        assert sample(backend, logits, tasks) == [alone[row, i] for row in range(rows) for i in range(len(variants(0)))]
        for row, i in ((0, 2), (3, 3), (4, 11), (2, 0), (1, 6), (4, 9)):  # fewer tasks than threads: they share its chunks
            task = variants(row)[i] | {"logits_row": row}
            assert sample(backend, logits, [task]) == [alone[row, i]]


def test_score_has_the_bits_of_generate(open_backend: Open) -> None:
    vocab = 5000
    logits = np.random.default_rng(2).standard_normal((20, vocab)).astype(np.float32) * 5
    backend = sampler(open_backend, vocab, 2)
    for temperature in (1.0, 0.6):
        draw = [
            {
                "logits_row": i,
                "wants_logprobs": 1,
                "seed": i,
                "temperature": temperature,
                "top_p": 0.8,
                "mode": FULL,
                "n_top": 4,
            }
            for i in range(20)
        ]
        drawn = sample(backend, logits, draw, vocab_limit=4900, banned=np.array([1, 2], np.int32))
        score = [
            {"logits_row": i, "is_score": 1, "target": r[ID], "wants_logprobs": 1, "temperature": temperature,
             "mode": FULL, "n_top": 4}
            for i, r in enumerate(drawn)
        ]  # fmt: skip
        for given, own in zip(sample(backend, logits, score, vocab_limit=4900), drawn, strict=True):
            assert given[: FULL_VALUE + 1] == own[: FULL_VALUE + 1]
            assert given[RANK:] == own[RANK:]
            assert temperature != 1.0 or given[RAW_VALUE] == given[FULL_VALUE]


def test_score_of_a_removed_token(open_backend: Open) -> None:
    logits = np.array([[3.0, 2.0, 1.0, 0.0]], np.float32)
    base = {"is_score": 1, "target": 3, "wants_logprobs": 1, "mode": PROCESSED, "n_top": 3}
    for more, rank in (({"top_k": 2}, 3), ({"banned": [3]}, 4), ({"allowed": [0, 1]}, 3)):
        result = sample(sampler(open_backend, 4), logits, [base | more])[0]
        assert result[PROCESSED_VALUE] == -np.inf and result[RANK] == rank
        assert abs(result[RAW_VALUE] - log_softmax(logits[0].astype(np.float64))[3]) < 1e-6


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 4095, 4999])
def test_statuses(bad: float, at: int, open_backend: Open) -> None:
    vocab = 5000
    logits = np.random.default_rng(4).standard_normal((3, vocab)).astype(np.float32)
    logits[1, at] = bad
    logits[2] = -np.inf
    tasks = [task | {"logits_row": row} for row in range(3) for task in variants(1)]
    n = len(variants(1))
    results = sample(sampler(open_backend, vocab, 2), logits, tasks, vocab_limit=4000)
    assert [r[STATUS] for r in results[:n]] == [0] * n
    assert [r[STATUS] for r in results[n : 2 * n]] == [1] * n
    assert [r[STATUS] for r in results[2 * n :]] == [0 if "target" in t and "top_k" not in t else 2 for t in variants(1)]
    none: list[dict[str, Any]] = [{"allowed": [4, 5], "banned": [4, 5]}, {"banned": list(range(4000)), "is_greedy": 1}]
    none += [{"mask": mask_of([], vocab)}, {"mask": mask_of([4500], vocab), "is_greedy": 1}]
    none += [{"allowed": [4500]}, {"bias": [(i, -np.inf) for i in range(4000)], "top_p": 0.5}]
    for task in none:
        assert sample(sampler(open_backend, vocab), logits[:1], [task], vocab_limit=4000)[0][STATUS] == 2


def test_minus_infinity_is_never_drawn(open_backend: Open) -> None:
    logits = np.full((1, 300), -np.inf, np.float32)
    logits[0, [17, 200]] = [1.0, 0.0]
    backend = sampler(open_backend, 300)
    tasks = [{"seed": s, "wants_logprobs": 1, "n_top": 4, "temperature": t} for s in range(50) for t in (1.0, 9.0)]
    for result in sample(backend, logits, tasks):
        assert result[ID] in (17, 200) and np.isfinite(result[PROCESSED_VALUE])
        assert [t[0] for t in result[TOP]] == [17, 200, 300, 300]
        assert result[MASS] == 1.0


@pytest.mark.parametrize("more", [{}, {"top_k": 24}, {"top_p": 0.9999999}, {"allowed": list(range(24))}, {"min_p": 1e-9}])
def test_draws_follow_the_distribution(more: dict[str, Any], open_backend: Open) -> None:
    """Chi-square test with fixed seeds: seeds, positions and sample indices are independent streams."""
    vocab, n = 24, 15_000
    logits = np.random.default_rng(8).standard_normal((1, vocab)).astype(np.float32)
    backend = sampler(open_backend, vocab)
    p = np.exp(log_softmax(logits[0].astype(np.float64)))
    streams: dict[str, list[dict[str, Any]]] = {
        "seed": [{"seed": i} for i in range(n)],
        "position": [{"seed": 1, "position": i} for i in range(n)],
        "sample_index": [{"seed": 2**63 + 5, "sample_index": i} for i in range(n)],
    }
    for tasks in streams.values():
        ids = [r[ID] for r in sample(backend, logits, [task | more for task in tasks])]
        counts = np.bincount(ids, minlength=vocab)
        chi = ((counts - n * p) ** 2 / (n * p)).sum()
        assert chi < 49.7  # 23 degrees of freedom, one in a thousand
        pairs = np.corrcoef(ids[:-1], ids[1:])[0, 1]
        assert abs(pairs) < 0.02


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Philox4x32-10 of one counter."""
    x, y, z, w = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * x, 0xCD9E8D57 * z
        x, y, z, w = (b >> 32) ^ y ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ w ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return x, y, z, w


def test_noise_is_philox_of_seed_position_and_sample(open_backend: Open) -> None:
    """With equal logits the sampled id has the greatest noise."""
    assert philox((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)  # the published answer
    for vocab in (3, 64, 65, 200):
        backend = sampler(open_backend, vocab)
        for seed, position, index in ((0, 0, 0), (12345678901234567, 5, 0), (2**64 - 1, 2**31, 3)):
            key = (seed & 0xFFFFFFFF, seed >> 32)
            u = [philox(key, (i // 4, position, index, 0))[i % 4] for i in range(vocab)]
            task = {"seed": seed, "position": position, "sample_index": index}
            logits = np.zeros((1, vocab), np.float32)
            assert sample(backend, logits, [task])[0][ID] == int(np.argmin(u))
            subset = list(range(1, vocab, 2))
            assert (
                sample(backend, logits, [task | {"allowed": subset}])[0][ID] == subset[int(np.argmin([u[i] for i in subset]))]
            )


def test_truncation_that_cuts_nothing_draws_alike(open_backend: Open) -> None:
    """Sampling from a list of ids and from the whole row use the same noise."""
    logits = np.random.default_rng(9).standard_normal((1, 700)).astype(np.float32)
    backend = sampler(open_backend, 700)
    for seed in range(60):
        plain, listed = sample(backend, logits, [{"seed": seed}, {"seed": seed, "allowed": list(range(700))}])
        assert plain[ID] == listed[ID]


def mixed(rng: np.random.Generator, row: int, vocab: int, n_top: int) -> dict[str, Any]:
    """A task with about half of all options."""
    ids = rng.permutation(vocab)[:200]
    task: dict[str, Any] = {
        "logits_row": row, "seed": int(rng.integers(2**63)), "position": int(rng.integers(9999)),
        "wants_logprobs": int(rng.random() < 0.7), "mode": int(rng.integers(3)), "sample_index": int(rng.integers(8)),
        "temperature": float(rng.choice([1.0, 1.0, 0.6, 1.7])),
    }  # fmt: skip
    if rng.random() < 0.15:
        task |= {"is_greedy": 1, "temperature": 1.0}
    elif rng.random() < 0.2:
        task |= {"is_score": 1, "target": int(ids[0]), "wants_logprobs": 1}
    options: dict[str, Any] = {
        "top_k": int(rng.choice([1, 7, 50, 600])), "top_p": float(rng.choice([0.2, 0.9, 0.99])), "min_p": 0.02,
        "banned": [int(i) for i in ids[50:60]], "allowed": sorted(int(i) for i in ids[20:120]),
        "bias": [(int(i), float(rng.choice([-np.inf, 3.0, -2.0]))) for i in ids[55:70]],
        "seen": [(int(i), int(rng.integers(3)), int(rng.integers(2))) for i in ids[65:200]], "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.1,
    }  # fmt: skip
    task |= {key: options[key] for key in options if rng.random() < 0.3}
    return task | {"n_top": n_top if task["wants_logprobs"] else 0}


@pytest.mark.parametrize("vocab", [1000, 49152, 128256, 151936, 262144])
def test_device_rows_alone_and_in_company(vocab: int, cuda: str) -> None:
    """All options mixed: near the CPU's values, the same ids, equal bits alone, in a batch and in two slots at once."""
    rng = np.random.default_rng(vocab)
    rows = 256 if vocab < 150_000 else 40
    logits = (rng.standard_normal((rows, vocab), np.float32) * rng.uniform(0.5, 6, (rows, 1))).astype(np.float32)
    logits[::5] = np.round(logits[::5] * 4) / 4  # many ties
    tasks = [mixed(rng, row, vocab, (0, 0, 5, 20)[row % 4]) for row in range(rows)]
    tasks[7] |= {"wants_logprobs": 1, "n_top": 1000}
    backend = Backend(cuda, max_rows=rows, vocab_size=vocab, library=hardware.cuda_library())
    banned, limit = np.array([3, vocab // 2], np.int32), vocab - 30
    together = sample(backend, logits, tasks, vocab_limit=limit, banned=banned)
    assert sample(backend, logits, tasks, vocab_limit=limit, banned=banned, slots=2) == together
    for row in (0, 1, 2, 7, 11, rows - 1):
        alone = sample(backend, logits[row : row + 1], [tasks[row] | {"logits_row": 0}], vocab_limit=limit, banned=banned)
        assert alone == [together[row]]
    cpu = Backend("cpu", num_threads=2, max_rows=rows, vocab_size=vocab)
    n_unlike = 0
    for task, own, other in zip(tasks, together, sample(cpu, logits, tasks, vocab_limit=limit, banned=banned), strict=True):
        assert own[STATUS] == other[STATUS]
        if own[ID] != other[ID]:  # rounding may decide a cut or a draw
            n_unlike += 1
            continue
        for at in (RAW_VALUE, FULL_VALUE, PROCESSED_VALUE, MASS) if task["wants_logprobs"] else ():
            assert own[at] == other[at] or abs(own[at] - other[at]) < 1e-4
        if task["mode"] != PROCESSED:
            assert own[RANK] == other[RANK] or task["mode"] == FULL
            assert [t[0] for t in own[TOP]] == [t[0] for t in other[TOP]] or task["mode"] == FULL
    assert n_unlike <= 2


@pytest.mark.parametrize("vocab", [1, 7, 1000, 4099, 151936])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_device_greedy_alone(vocab: int, rows: int, cuda: str) -> None:
    """Calls with only greedy tasks equal calls that also return logprobs: ties, zeros of both signs, statuses."""
    rng = np.random.default_rng(vocab + rows)
    logits = rng.standard_normal((rows + 2, vocab)).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    logits[1] = np.where(rng.random(vocab) < 0.5, np.float32(-0.0), np.float32(0.0))
    if rows > 3:
        logits[5, vocab // 2] = np.nan
        logits[6, vocab - 1] = np.inf
        logits[7] = -np.inf
        logits[8] = -np.inf
        logits[8, vocab // 3] = -5
    backend = Backend(cuda, max_rows=rows + 2, vocab_size=vocab, library=hardware.cuda_library())
    tasks: list[dict[str, Any]] = [{"logits_row": row + 1, "is_greedy": 1} for row in range(rows)]
    for limit in (vocab, max(1, vocab - 5)):
        plain = sample(backend, logits, tasks, vocab_limit=limit)
        full = sample(backend, logits, [task | {"wants_logprobs": 1} for task in tasks], vocab_limit=limit)
        apart = sample(backend, logits, tasks[:1] + tasks[2:], vocab_limit=limit)
        assert [(r[ID], r[STATUS]) for r in plain] == [(r[ID], r[STATUS]) for r in full]
        assert [(r[ID], r[STATUS]) for r in apart] == [(r[ID], r[STATUS]) for r in plain[:1] + plain[2:]]


def test_device_lists_everything(cuda: str) -> None:
    """The whole vocabulary as alternatives, with ties."""
    vocab = 20_000
    logits = coarse(5, vocab)[None]
    backend = Backend(cuda, vocab_size=vocab, library=hardware.cuda_library())
    task = {"wants_logprobs": 1, "n_top": vocab, "seed": 3}
    result = sample(backend, logits, [task])[0]
    check(result, reference(logits[0], task), task, 1e-5)
    seconds = backend.seconds
    sample(backend, logits, [task])
    assert min(seconds, backend.seconds) < 0.05
