"""Models that take images: against transformers, and equal bits however their prompts are computed."""

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import transformers
from modules import load

from llmpy import LLM, AsyncEngine, InvalidRequestError, NonFiniteLogitsError, SamplingParams, UnsupportedError, models
from llmpy.engine.images import tables_of
from llmpy.inputs import Prompt
from llmpy.models.interpret import Interpreter
from llmpy.vision.items import PlacedItem

ours = load(Path(__file__).with_name("vision_models.py"))
BOUND = 1e-4  # of a logit, relative to the largest
EXACT = ["llava", "qwen3-vl", "gemma3", "deepseek-ocr", "paligemma"]


@pytest.fixture(scope="module")
def vision(tmp_path_factory, random_parameters):
    """vision(family) -> VisionModel; each is made once."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = ours.VisionModel(ours.FAMILIES[name], tmp_path_factory.mktemp(name), random_parameters)
        return made[name]

    return make


def prompts_of(model):
    """Parts of prompts: no image, one in the middle, two with text between, one alone, two with one token between."""
    a, b, c = model.images(3)
    return [[5, 9, 77, 4], [3, 8, a, 20, 21], [b, 6, a, 7], [c], [4, a, 11, c, 9]]


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def images_of(parts):
    return [part for part in parts if isinstance(part, np.ndarray)]


def families(*slow):
    """Every family; those of which others test all parts are slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in ours.FAMILIES]


@pytest.mark.parametrize("name", families(*(set(ours.FAMILIES) - {"llava", "qwen2.5-vl"})))
def test_the_interpreter_matches_transformers(name, vision, files_of):
    model = vision(name)
    checkpoint = models.open_checkpoint(files := files_of(model.directory))
    spec = models.load(files, checkpoint).spec

    def read(tensor, shape):
        return np.frombuffer(checkpoint.read_float32(tensor), np.float32).reshape(shape)

    tower, text = Interpreter(spec["towers"]["image"], read), Interpreter(spec, read)
    for parts in prompts_of(model)[2:3]:
        ids, placed = model.prompt(parts)
        features = [row for one in placed for row in features_of(tower, one.item)]
        is_visual = np.array(ids) == ours.FEATURE
        images = {"visual": np.where(is_visual, np.cumsum(is_visual) - 1, -1)}
        if features:
            images["features"] = np.stack(features)
        if model.positions(placed, len(ids)) is not None:
            images["positions"] = model.positions(placed, len(ids))
        want = model.logits(ids, images_of(parts))
        assert np.abs(text.logits(ids, images) - want).max() <= BOUND * np.abs(want).max()


def features_of(tower, item):
    """Features of an image in the order of its placeholders."""
    rows = np.concatenate([tower.features(piece) for piece in pieces_of(item)])
    places = item.tables["places"].values if "places" in item.tables else np.arange(len(rows))
    return rows[np.argsort(places)]


def pieces_of(item):
    ends = np.cumsum([piece.n_rows for piece in item.pieces])
    return [{"rows": rows, **tables_of(item, i)} for i, rows in enumerate(np.split(item.rows, ends[:-1]))]


@pytest.mark.parametrize("name", families("qwen2-vl", "idefics3", "pixtral", "llama4", "paligemma2"))
def test_the_engine_matches_transformers(name, vision, device, open_engine):
    model = vision(name)
    parts = prompts_of(model) if name in EXACT[:3] else prompts_of(model)[:3]  # a text alone, images among texts
    ids, placed = zip(*(model.prompt(each) for each in parts), strict=True)
    with open_engine(device, model.directory) as engine:
        alone = [engine.run([one], 4, 99, [images])[0] for one, images in zip(ids, placed, strict=True)]
        mixed = engine.run(ids, 4, 99, placed)
    for answer, other, one, each in zip(alone, mixed, ids, parts, strict=True):
        want = model.logits(one, images_of(each))
        allowed = 2 * BOUND * np.abs(want).max()
        assert np.abs(answer.table(99) - log_softmax(want)[:-1]).max() <= allowed
        tokens = model.greedy(one, images_of(each), 3)
        assert answer.ids[: len(tokens)] == tokens
        assert (answer.ids, answer.logprobs) == (other.ids, other.logprobs)
        assert np.array_equal(answer.prompt_top, other.prompt_top)


def test_features_of_several_layers(tmp_path, random_parameters, device, open_engine):
    """LLaVA with a list of layers: their columns are joined in its order, and a layer may stand in it twice."""

    def config():
        found = ours.llava()
        found.vision_feature_layer = [-1, -3, -1]
        return found

    family = dataclasses.replace(ours.FAMILIES["llava"], config=config)
    model = ours.VisionModel(family, tmp_path, random_parameters)
    assert model.model.model.multi_modal_projector.linear_1.in_features == 3 * 32
    parts = prompts_of(model)[2]
    ids, placed = model.prompt(parts)
    with open_engine(device, model.directory) as engine:
        answer = engine.run([ids], 4, 99, [placed])[0]
    want = model.logits(ids, images_of(parts))
    assert np.abs(answer.table(99) - log_softmax(want)[:-1]).max() <= 2 * BOUND * np.abs(want).max()


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 4, "max_num_seqs": 4},  # chunks end inside images
        {"encoder": (256, 0)},  # the pool holds one image
        {"encoder": (256, 256), "num_threads": 1},
        {"kv_cache_bytes": 48 << 10, "max_num_seqs": 4, "max_model_len": 80},  # sequences are preempted
    ],
    ids=["chunks", "one image", "one thread", "preemption"],
)
def test_equal_bits_in_batches_chunks_and_small_pools(name, options, vision, device, open_engine):
    model = vision(name)
    ids, placed = zip(*(model.prompt(each) for each in prompts_of(model)), strict=True)
    n = 24 if "kv_cache_bytes" in options else 8
    with open_engine(device, model.directory) as engine:
        alone = [engine.run([one], n, 99, [images])[0] for one, images in zip(ids, placed, strict=True)]
    if model.family.is_prefix and "max_num_batched_tokens" in options:  # a prompt is one step
        options = {**options, "max_num_batched_tokens": max(map(len, ids))}
    if options.get("encoder") == (256, 0):
        pages = [[-(-one.item.n_tokens // 16) for one in images] for images in placed]
        options = {"encoder": (256, 16 * max((sum if model.family.is_prefix else max)(each or [0]) for each in pages))}
    with open_engine(device, model.directory, **options) as engine:
        for answer, want in zip(engine.run(ids * 2, n, 99, placed * 2), alone * 2, strict=True):
            assert (answer.ids, answer.logprobs) == (want.ids, want.logprobs)
            assert np.array_equal(answer.prompt_top, want.prompt_top)
        assert "kv_cache_bytes" not in options or engine.engine.stats()["num_preemptions"]


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3", "deepseek-ocr"])
def test_ranks_have_the_bits_of_one(name, vision, device, open_engine):
    """Every rank computes the whole tower; embedding, attention and mixtures of the text are shared out."""
    model = vision(name)
    ids, placed = zip(*(model.prompt(each) for each in prompts_of(model)[:3]), strict=True)
    answers = []
    for n_ranks in (1, 2):
        with open_engine(device, model.directory, n_ranks=n_ranks, replicate_bytes=0, max_num_batched_tokens=48) as engine:
            answers.append(engine.run(ids, 6, 9, placed))
    for one, two in zip(*answers, strict=True):
        assert (one.ids, one.logprobs) == (two.ids, two.logprobs)
        assert np.array_equal(one.prompt_top, two.prompt_top)


@pytest.mark.parametrize("name", EXACT[:4])
def test_a_prefix_that_ends_before_inside_or_behind_an_image(name, vision, device, open_engine):
    model = vision(name)
    (image,) = model.images(1)
    text = list(range(3, 18))
    with open_engine(device, model.directory, enable_prefix_caching=True) as engine:
        for before in (0, 9, 15):  # the first 16 tokens are text and image, one block
            ids, placed = model.prompt([*text[:before], image, *text])
            longer, others = model.prompt([*text[:before], image, *text, 40, 41])
            first = engine.run([ids], 4, None, [placed])[0]
            again = engine.run([ids], 4, None, [placed])[0]
            behind = engine.run([longer], 4, None, [others])[0]
            assert (first.ids, first.logprobs) == (again.ids, again.logprobs)
            assert again.n_cached >= 16 and behind.n_cached >= 16
    with open_engine(device, model.directory) as engine:
        cold = engine.run([longer], 4, None, [others])[0]
    assert (cold.ids, cold.logprobs) == (behind.ids, behind.logprobs)


@pytest.mark.parametrize("name", EXACT[:2])
def test_two_images_never_share_blocks(name, vision, device, open_engine):
    """Equal ids, other images; and one image whose range begins elsewhere."""
    model = vision(name)
    a, b = model.images(3)[0], model.images(3)[0] ^ 1
    with open_engine(device, model.directory, enable_prefix_caching=True) as engine:
        answers = []
        for parts in ([a, *range(3, 20)], [b, *range(3, 20)]):
            ids, placed = model.prompt(parts)
            answers.append(engine.run([ids], 2, None, [placed])[0])
        assert [answer.n_cached for answer in answers] == [0, 0] and answers[0].logprobs != answers[1].logprobs
        moved = [dataclasses.replace(placed[0], n_tokens=placed[0].n_tokens + 3)]
        assert engine.run([ids], 2, None, [placed])[0].n_cached == len(ids) // 16 * 16
        assert engine.run([ids], 2, None, [moved])[0].logprobs == answers[1].logprobs


def test_prompts_whose_tokens_see_each_other_share_only_with_their_like(vision, device, open_engine):
    """PaliGemma: an equal prompt is found, another end, image or text leaves nothing to share, and scores see their prefix."""
    model = vision("paligemma")
    a, b = model.images(3)[0], model.images(3)[0] ^ 1
    with open_engine(device, model.directory, enable_prefix_caching=True) as engine:
        answers = []
        for parts in ([a, *range(3, 30)], [a, *range(3, 31)], [b, *range(3, 30)], [a, *range(3, 30)]):
            ids, placed = model.prompt(parts)
            answers.append(engine.run([ids], 2, None, [placed])[0])
        assert [answer.n_cached for answer in answers] == [0, 0, 0, 32]
        assert answers[3].logprobs == answers[0].logprobs
        text = list(range(3, 40))
        first, again = (engine.run([text], 2, None)[0] for _ in range(2))
        assert again.n_cached == 32 and again.logprobs == first.logprobs
    refused = pytest.raises(InvalidRequestError, match="max_num_batched_tokens=16 tokens, because they see each other")
    with open_engine(device, model.directory, max_num_batched_tokens=16) as engine, refused:
        engine.run([text])


def test_images_that_do_not_fit_are_refused(vision, device, open_engine):
    model = vision("llava")
    ids, (one,) = model.prompt([4, model.images(1)[0], 5])
    item = one.item
    n = item.n_tokens
    broken = item.tables["rows.patches"]._replace(values=np.full(n, 99, np.int32))
    wrong = [
        (PlacedItem(item, 2, n), f"wanted {n} placeholders for its features, have {n - 1}"),
        (PlacedItem(item, 1, 4 * n), "wanted a range of the prompt's"),
        (PlacedItem(dataclasses.replace(item, rows=item.rows[:, :-3]), 1, n), "bytes a patch"),
        (PlacedItem(dataclasses.replace(item, tables={**item.tables, "rows.patches": broken}), 1, n), "wanted rows below"),
        (PlacedItem(dataclasses.replace(item, tables={}), 1, n), "have 0"),
    ]
    with open_engine(device, model.directory) as engine:
        for placed, message in wrong:
            with pytest.raises(InvalidRequestError, match=message):
                engine.run([ids], placed=[[placed]])
    refused = pytest.raises(InvalidRequestError, match="max_encoder_rows")
    with open_engine(device, model.directory, encoder=(8, 256)) as engine, refused:
        engine.run([ids], placed=[[one]])


def test_tables_of_pages_that_do_not_fit_are_refused(vision, device, open_engine):
    model = vision("deepseek-ocr")
    ids, (one,) = model.prompt([4, model.images(1)[0], 5])
    item = one.item
    wrong = {
        "places": (1000, "wanted places of its"),
        "distances.1": (77, "wanted rows below 23"),
        "rows.windows": (999, "wanted rows below"),
        "rows.near": (-2, "wanted rows below"),
        "rows.features": (-4, "wanted rows below"),
        "cells.index": (10, "wanted rows below 10"),
    }
    with open_engine(device, model.directory) as engine:
        for name, (value, message) in wrong.items():
            values = item.tables[name].values.copy()
            values[..., -1] = value
            broken = dataclasses.replace(item, tables={**item.tables, name: item.tables[name]._replace(values=values)})
            with pytest.raises(InvalidRequestError, match=message):
                engine.run([ids], placed=[[PlacedItem(broken, 1, item.n_tokens)]])
        fewer = item.tables["shares.0"]._replace(ends=(3, 6, 9))
        broken = dataclasses.replace(item, tables={**item.tables, "shares.0": fewer})
        with pytest.raises(InvalidRequestError, match="two rows and shares for each distance"):
            engine.run([ids], placed=[[PlacedItem(broken, 1, item.n_tokens)]])


def test_llm_takes_images_beside_texts(vision):
    model = vision("llava")
    parts = prompts_of(model)[:3]
    prompts = [model.request(each) for each in parts]
    options = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB", "max_encoder_rows": 16}
    options |= {"encoder_cache_tokens": 64, "enable_prefix_caching": True, "kv_event_capacity": 64}
    with LLM(model.directory, tensor_parallel_size=2, **options) as llm:
        for output, each in zip(llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4)), parts, strict=True):
            tokens = model.greedy(model.prompt(each)[0], images_of(each), 3)
            assert list(output.outputs[0].token_ids)[: len(tokens)] == tokens
        stats, (_, events) = llm.stats(), llm.kv_events()
    assert (stats.images_encoded, stats.image_pieces, stats.image_rows) == (2, 2, 20)
    assert stats.allocations_since_warmup == stats.image_cache_evictions == 0
    assert stats.image_cache_hits + stats.images_encoded <= 3
    both = b"".join(one.item.content for one in prompts[2].images)
    assert both in [event.images for event in events if event.kind == 0]  # a block with tokens of two images names both


def test_counts_of_images(vision):
    """Images of a step, found and computed again, by request and in all; a pool of one image forgets the first one."""
    model = vision("llava")
    a, b, _ = model.images(3)

    def prompt(*parts):
        return model.request(parts)

    options = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB", "enable_prefix_caching": False}
    params = SamplingParams(temperature=0, max_tokens=2)
    with LLM(model.directory, encoder_cache_tokens=16, max_encoder_rows=16, **options) as llm:
        cached = [llm.generate([prompt(*parts, 3)], params)[0].num_cached_images for parts in ([a], [a], [b], [a, 7])]
        stats, steps = llm.stats(), llm.step_log()
        metrics = {each.name: each.value for each in llm.get_metrics() if each.name.startswith("vllm:mm_")}
    assert cached == [0, 1, 0, 0]
    assert (stats.images_encoded, stats.image_cache_hits, stats.image_cache_evictions, stats.images_reencoded) == (3, 1, 2, 0)
    assert sum(step.tower_pieces for step in steps) == 3 and sum(step.tower_rows for step in steps) == stats.image_rows == 30
    assert metrics == {"vllm:mm_cache_queries": 4, "vllm:mm_cache_hits": 1, "vllm:mm_cache_evictions": 2}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_features_that_are_not_finite_end_their_request_alone(value, vision, device):
    """Its neighbours keep their bits, also in the pages that it leaves behind; the error names the image's place."""
    model = vision("llava")
    prompts = [model.request(parts) for parts in prompts_of(model)[:3]]
    placed = prompts[-1].images
    weights = placed[0].item.tables["taps.weight"]
    torn = dataclasses.replace(
        placed[0].item, content=b"0123456789abcdef",
        tables={**placed[0].item.tables, "taps.weight": weights._replace(values=weights.values * np.float32(value))},
    )  # fmt: skip
    bad = Prompt(None, prompts[2].ids)
    bad.images = [dataclasses.replace(placed[0], item=torn), placed[1]]
    options = {"device": device, "dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB"}
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0)

    def bits(output):
        return list(output.outputs[0].token_ids), output.outputs[0].token_logprobs.tobytes()

    with LLM(model.directory, **options) as llm:
        alone = [bits(llm.generate([prompt], params)[0]) for prompt in prompts]
    with LLM(model.directory, **options | {"kv_cache_memory_bytes": 128 << 10, "max_model_len": 64}) as llm:
        for _ in range(3):
            outputs = llm.generate([prompts[0], bad, *prompts[1:]], params, on_error="return")
            first, last = placed[0].first, placed[0].first + placed[0].n_tokens - 1
            with pytest.raises(NonFiniteLogitsError, match=rf"features of images at positions {first} to {last}, "):
                raise outputs[1].error
            assert [bits(outputs[i]) for i in (0, 2, 3)] == alone


def test_images_computed_again_are_counted(vision, open_engine):
    """Preempted prompts whose features have made room."""
    model = vision("llava")
    ids, placed = zip(*(model.prompt(each) for each in prompts_of(model)), strict=True)
    small = {"encoder": (256, 16), "kv_cache_bytes": 40 << 10, "max_num_seqs": 4, "max_model_len": 64}
    with open_engine("cpu", model.directory, **small) as engine:
        engine.run(ids * 2, 24, 99, placed * 2)
        stats = engine.engine.stats()
    assert stats["num_preemptions"] and 0 < stats["images_reencoded"] < stats["images_encoded"]


def test_a_text_passes_images_that_wait_for_the_tower(vision):
    """A step computes one image; the text behind three of them is in a step before them."""
    model = vision("llava")
    prompts = [model.request(parts) for parts in [[image, 3] for image in model.images(3)] + [[5, 9, 77]]]
    options = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB", "max_encoder_rows": 16}
    with LLM(model.directory, encoder_cache_tokens=64, max_num_batched_tokens=128, **options) as llm:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
        rows = [step.rows for step in llm.step_log()]
    one = len(prompts[0].ids)
    assert rows == [3, one, one, one]


def test_a_large_image_is_computed_in_parts(vision):
    """A text is in a step between two parts. Results keep their bits beside it, and behind an image that was aborted."""
    model, random = vision("qwen3-vl"), np.random.default_rng(0)
    images = [random.integers(0, 256, (32 * side, 1024, 3), dtype=np.uint8) for side in (34, 36)]
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=0)
    prompts = [model.request(parts) for parts in ([3, images[0], 5], [4, images[1], 7], [8, *model.images(1), 9])]
    options = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB", "max_encoder_rows": 5000}
    options |= {"max_model_len": 2048, "max_num_batched_tokens": 2048, "encoder_cache_tokens": 4096}
    text = json.loads((model.directory / "config.json").read_text())["text_config"]
    options |= {"hf_overrides": {"text_config": {**text, "max_position_embeddings": 2048}}}

    def bits(output):
        return list(output.outputs[0].token_ids), output.outputs[0].token_logprobs.tobytes()

    async def beside() -> tuple[list[Any], list[Any], Any]:
        async with AsyncEngine.create(model.directory, **options) as engine:
            texts = [await engine.generate([5, 9, 77, 4], params)]
            dropped = asyncio.ensure_future(engine.generate(prompts[0], params))
            while not any(step.tower_rows for step in engine.step_log()):
                await asyncio.sleep(0)
            dropped.cancel()
            tasks = [asyncio.ensure_future(engine.generate(each, params)) for each in prompts]
            while not all(task.done() for task in tasks):
                texts.append(await engine.generate([5, 9, 77, 4], params))
            return [await task for task in tasks], texts, engine.step_log()

    with LLM(model.directory, **options) as llm:
        alone = [bits(llm.generate([each], params)[0]) for each in prompts]
        steps = llm.step_log()
    assert [step.tower_rows for step in steps if step.tower_rows] == [4 * 32 * 34, 4 * 32 * 36, 24]
    assert sum(not step.rows for step in steps) >= 2  # parts of images that no row waits for
    tokens = model.greedy(prompts[0].ids.tolist(), images[:1], 1)
    assert alone[0][0][:1] == tokens
    with LLM(model.directory, tensor_parallel_size=2, **options) as llm:
        assert [bits(each)[0] for each in llm.generate(prompts[:1], params)] == [alone[0][0]]
    outputs, texts, steps = asyncio.run(beside())
    assert [bits(each) for each in outputs] == alone
    assert len({bits(each)[1] for each in texts}) == 1
    begins = [i for i, step in enumerate(steps) if step.tower_rows > 1000]
    ends = [i for i, step in enumerate(steps) if step.rows >= 256 and i > begins[-1]]  # of the image's prompt, beside texts
    assert any(0 < step.rows < 256 for step in steps[begins[-1] : ends[0]])  # a text beside, or between, its parts


def test_inspect_prints_towers(vision, capsys):
    from llmpy.cli import main

    assert main(["inspect", str(vision("deepseek-ocr").directory)]) == 0
    text = capsys.readouterr().out
    assert "tower image, token 98" in text and "grid_attention" in text and "splice" in text


@pytest.mark.parametrize("name", ["llava", "qwen3-vl", "gemma3", "paligemma"])
def test_no_images_no_tower(name, vision):
    """limit_mm_per_prompt={"image": 0}: less memory, the same bits of texts; updates may bring the tower's tensors."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = vision(name)
    texts, params = [[5, 9, 77, 4], [3, 8, 20]], SamplingParams(temperature=0, max_tokens=6, logprobs=0)
    options = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB"}
    answers, memory = [], []
    for limits in (None, {"image": 0}):
        with LLM(model.directory, limit_mm_per_prompt=limits, **options) as llm:
            memory.append(llm.memory())
            outputs = llm.generate(texts, params)
            if limits:
                llm.update_weights(safetensors.load_file(next(model.directory.glob("*.safetensors"))).items())
                outputs += llm.generate(texts, params)
                with pytest.raises(UnsupportedError, match="has no tower for images"):
                    llm.generate({"prompt_token_ids": [98], "multi_modal_data": {"image": model.images(1)[0]}})
            answers.append([(list(one.outputs[0].token_ids), one.outputs[0].token_logprobs.tolist()) for one in outputs])
    assert answers[1] == answers[0] * 2
    tower = sum(p.numel() for name, p in model.model.named_parameters() if "vision" in name or "visual" in name)
    assert memory[0]["weights"] - memory[1]["weights"] >= 2 * tower
    assert memory[1]["tower_weights"] == memory[1]["tower"] == memory[1]["image_features"] == 0
    assert memory[0]["activations"] - memory[1]["activations"] > 0.9 * memory[0]["tower"] > memory[0]["image_features"] > 0
    assert memory[0]["weights"] - memory[1]["weights"] >= memory[0]["tower_weights"] >= tower


def test_what_is_not_supported_is_named(vision):
    options = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB"}
    with pytest.raises(UnsupportedError, match="vision_feature_layer='last' is not supported"):
        LLM(vision("llava").directory, hf_overrides={"vision_feature_layer": "last"}, **options)
    with pytest.raises(UnsupportedError, match="model_type 'mamba'"):
        LLM(vision("llava").directory, hf_overrides={"text_config": {"model_type": "mamba"}}, **options)


def test_images_behind_an_update_of_the_weights_and_behind_sleep(vision, tmp_path):
    """The features of the old weights are dropped; the convolution of five dimensions is written as the matrix that it is."""
    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    model = vision("qwen3-vl")
    ids, placed = model.prompt([3, 8, model.images(1)[0], 20])
    new = {name: tensor * (1.25 if "patch_embed" in name else 1) for name, tensor in safetensors.load_file(
        next(model.directory.glob("*.safetensors"))).items()}  # fmt: skip
    safetensors.save_file(new, tmp_path / "model.safetensors")
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(model.directory / name, tmp_path)
    options = {"device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB"}

    def logprobs(llm):
        prompt = Prompt(None, np.array(ids, np.int32))
        prompt.images = placed
        output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=3, logprobs=0))[0].outputs[0]
        return output.token_logprobs.tolist()

    with LLM(tmp_path, **options) as llm:
        want = logprobs(llm)
    with LLM(model.directory, **options) as llm:
        old = logprobs(llm)
        llm.update_weights([(name, torch.as_tensor(tensor)) for name, tensor in new.items()])
        assert logprobs(llm) == want != old
        llm.sleep(1)
        llm.wake_up()
        assert logprobs(llm) == want


def test_experts_as_released(vision, device, open_engine, tmp_path):
    """Released files of Qwen3-VL-MoE have experts with columns before rows, transformers saves them the other way round."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = vision("qwen3-vl-moe")
    ids, placed = model.prompt([3, 8, model.images(1)[0], 20])
    tensors = safetensors.load_file(next(model.directory.glob("*.safetensors")))
    turned = {name: x.transpose(1, 2).contiguous() if ".experts." in name else x for name, x in tensors.items()}
    assert sum(".experts." in name for name in turned) == 4
    safetensors.save_file(turned, tmp_path / "model.safetensors")
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(model.directory / name, tmp_path)
    answers = []
    for directory in (model.directory, tmp_path):
        with open_engine(device, directory) as engine:
            answers.append(engine.run([ids], 2, 9, [placed])[0])
    assert np.array_equal(answers[0].prompt_top, answers[1].prompt_top) and answers[0].logprobs == answers[1].logprobs


PROCESSORS = {
    "llava": ("CLIPImageProcessor", {"size": {"shortest_edge": 42}, "crop_size": {"height": 42, "width": 42}}),
    "qwen2-vl": ("Qwen2VLImageProcessor", {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}}),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_images_as_a_user_gives_them(name, vision, device, tmp_path):
    """From pixels of any size to tokens: our preparation and tower against transformers' processor and model."""
    model = vision(name)
    kind, how = PROCESSORS[name]
    processor = getattr(transformers, kind)(**how)
    for file in model.directory.iterdir():
        shutil.copy(file, tmp_path)
    processor.save_pretrained(tmp_path)
    image = np.random.default_rng(5).integers(0, 256, (61, 90, 3), dtype=np.uint8)
    given = dict(processor(images=[image], return_tensors="pt"))
    n_features = int(given["image_grid_thw"].prod()) // 4 if "image_grid_thw" in given else 9
    ids = [3, 8, *[ours.FEATURE] * n_features, 20, 21]
    inputs = {"input_ids": torch.tensor([ids]), **given}
    if model.family.wants_types:
        inputs[model.family.types] = (inputs["input_ids"] == ours.FEATURE).int()
    wanted = model.model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, len(ids) :].tolist()
    options = {"device": device, "dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB"}
    with LLM(tmp_path, **options) as llm:
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": image}}
        outputs = llm.generate([prompt, [5, 9, 77]], SamplingParams(temperature=0, max_tokens=4))
    assert outputs[0].prompt_token_ids == ids and outputs[0].num_image_tokens == n_features
    assert outputs[0].outputs[0].token_ids[: len(wanted)] == wanted


def test_pages_as_a_user_gives_them(vision, device):
    """DeepSeek-OCR's fields lie in processor_config.json itself; its items have pieces with places of their own."""
    model = vision("deepseek-ocr")
    images = model.images(2)
    parts = [3, 8, images[0], 20, images[1], 21]
    ids, _ = model.prompt(parts)
    options = {"device": device, "dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": "16MiB"}
    with LLM(model.directory, **options) as llm:
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4))[0]
    tokens = model.greedy(ids, images, 4)
    assert output.outputs[0].token_ids[: len(tokens)] == tokens and output.num_image_tokens == ids.count(ours.FEATURE)
