"""How long an image takes before it reaches the engine, in processor time of one core, beside Pillow; and in the engine.

    python benchmarks/images.py [--height 1080] [--width 1920]
    python benchmarks/images.py --engine [--model llava] [--device cuda] [--layers 28] [--images 32] [--rates 1,4] [--profile]

The image is a smooth one with noise, as a JPEG of quality 90. Times are the least of --runs.

--engine: an engine of Qwen2.5-VL-7B's shape with random weights in bfloat16, images of 1024 x 1024 pixels, all different, from
arrays to the first token, their preparation included. One image alone, beside a text of as many tokens: the difference is the
tower's and the preparation's. Then images a second, beside the bound by the operations of tower and text at --peak TFLOP/s.
Then the first token of a text of 128 tokens: alone, beside images that come at random at each of --rates a second, and
while four requests with an image are in flight at any time. Medians over rounds.

--model llava: LLaVA 1.5's shape and images of 336 x 336 pixels. --model small: Qwen2.5-VL at sizes for a CPU. --profile prints
the kernels' times of --images at once.
"""

import argparse
import asyncio
import io
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from results import Results

from llmpy import LLM, AsyncEngine, SamplingParams
from llmpy.vision import sizes
from llmpy.vision.cuts import resize
from llmpy.vision.decode import Limits, decode
from llmpy.vision.fields import Fields
from llmpy.vision.processors import Processor

KINDS = {
    "Qwen2-VL": ({"model_type": "qwen2_vl"}, "Qwen2VLImageProcessor", {}),
    "SmolVLM": (
        {"model_type": "smolvlm", "vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4},
        "SmolVLMImageProcessor",
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
    ),
    "LLaVA 1.5": (
        {"model_type": "llava"},
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    ),
}


def least(call: Callable[[], object], runs: int) -> float:
    """Milliseconds of processor time."""
    times = []
    for _ in range(runs):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times) * 1e3


QWEN: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "image_token_id": 151655,
    "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vocab_size": 152064, "hidden_size": 3584,
    "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28,
    "max_position_embeddings": 128000, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "out_hidden_size": 3584, "patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "spatial_merge_size": 2, "temporal_patch_size": 2,
        "hidden_act": "silu"},
}  # fmt: skip
LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 32000,
    "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu",
    "text_config": {
        "model_type": "llama", "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "rope_theta": 1e4, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "image_size": 336, "patch_size": 14, "hidden_act": "quick_gelu"},
}  # fmt: skip


class Shape(NamedTuple):
    """A model; side of its images in pixels; features and floating-point operations of one, the latter by the tower."""

    config: dict[str, Any]
    processor: dict[str, Any]
    side: int
    features: int
    token: int
    tower_flop: float

    def with_layers(self, n: int) -> dict[str, Any]:
        changed: dict[str, Any] = {"num_hidden_layers": n}
        if "text_config" in self.config:
            changed = {"text_config": {**self.config["text_config"], **changed}}
        return {**self.config, **changed}

    def text_flop(self, n_layers: int) -> float:
        """Of the linears of a prompt with an image; the few tokens around it and the text's attention left out."""
        text = self.config.get("text_config", self.config)
        kv = text["hidden_size"] // text["num_attention_heads"] * text["num_key_value_heads"]
        layer = 2 * text["hidden_size"] * (text["hidden_size"] + kv) + 3 * text["hidden_size"] * text["intermediate_size"]
        return float(2 * self.features * n_layers * layer)


SMALL: dict[str, Any] = {
    **QWEN, "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "vocab_size": 32000, "image_token_id": 31001, "vision_start_token_id": 31002,
    "vision_end_token_id": 31003, "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    "vision_config": {**QWEN["vision_config"], "depth": 8, "hidden_size": 64, "num_heads": 4, "intermediate_size": 172,
                      "out_hidden_size": 256, "fullatt_block_indexes": []},
}  # fmt: skip
ROWS = 74 * 74  # patches of an image of 1024 x 1024, which becomes one of 1036 x 1036
SMALL_ROWS = 46 * 46
TOWER = ROWS * 32 * (2 * (4 * 1280**2 + 3 * 1280 * 3420)) + 4 * 1280 * ROWS * (4 * ROWS + 28 * 64) + ROWS // 2 * 5120 * 8704
SMALL_TOWER = SMALL_ROWS * (8 * 2 * (4 * 64**2 + 3 * 64 * 172) + 4 * 64 * 8 * 64) + SMALL_ROWS // 2 * 256 * 512
CLIP = 577 * 23 * (2 * 12 * 1024**2 + 4 * 1024 * 577) + 576 * 2 * 4096 * (1024 + 4096)
SHAPES = {
    "qwen2.5-vl": Shape(
        QWEN,
        {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 3136, "longest_edge": 12845056}},
        1024, ROWS // 4, 151655, TOWER),
    "small": Shape(
        SMALL,
        {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 3136, "longest_edge": 12845056}},
        644, SMALL_ROWS // 4, 31001, SMALL_TOWER),
    "llava": Shape(
        LLAVA,
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336},
         "crop_size": {"height": 336, "width": 336}},
        336, 576, 32000, CLIP),
}  # fmt: skip
ONE = SamplingParams(temperature=0, max_tokens=1)
Traffic = Coroutine[Any, Any, None]


class Prompts:
    """Prompts that all differ; images come again after 256 others."""

    def __init__(self, shape: Shape) -> None:
        self.rng, self.shape = np.random.default_rng(0), shape
        base = self.rng.integers(0, 256, (shape.side, shape.side, 3), dtype=np.uint8)
        rolls = self.rng.integers(shape.side, size=(256, 2))
        self.images = itertools.cycle([np.roll(base, roll, (0, 1)) ^ np.uint8(i) for i, roll in enumerate(rolls)])

    def text(self, n: int) -> list[int]:
        return [int(each) for each in self.rng.integers(1000, 30000, n)]

    def image(self) -> Any:
        """An image and some text."""
        ids = [*self.text(4), *[self.shape.token] * self.shape.features, *self.text(16)]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": next(self.images)}}


def timed(call: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


async def answer(engine: AsyncEngine, prompts: Prompts) -> None:
    await engine.generate(prompts.image(), ONE)


async def keep(engine: AsyncEngine, prompts: Prompts) -> None:
    """A request with an image is in flight at any time."""
    while True:
        await answer(engine, prompts)


async def send(engine: AsyncEngine, prompts: Prompts, rate: float) -> None:
    """Requests with an image come at random."""
    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(prompts.rng.exponential(1 / rate))
            group.create_task(answer(engine, prompts))


async def first_tokens(engine: AsyncEngine, prompts: Prompts, seconds: float, *traffic: Traffic) -> list[float]:
    """Milliseconds to the first token of texts of 128 tokens, one after the other, while there is traffic."""
    await engine.generate(prompts.text(128), ONE)
    tasks = [asyncio.create_task(each) for each in traffic]
    await asyncio.sleep(0.5 if tasks else 0)
    found, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        await engine.generate(prompts.text(128), ONE)
        found.append(1e3 * (time.perf_counter() - start))
        await asyncio.sleep(prompts.rng.uniform(0.01, 0.04))
    for task in tasks:
        if task.done():
            raise RuntimeError("the traffic ended") from task.exception()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def beside_texts(options: dict[str, Any], prompts: Prompts, chosen: argparse.Namespace) -> None:
    async with AsyncEngine.create(**options) as engine:
        await engine.generate(prompts.image(), ONE)
        alone = statistics.median(await first_tokens(engine, prompts, chosen.seconds))
        print(f"first token of a text of 128 tokens: alone {alone:.1f} ms", flush=True)
        kinds = [(f"beside {rate:g} images a second", [send(engine, prompts, rate)]) for rate in chosen.rates]
        for name, traffic in [*kinds, ("beside four images at any time", [keep(engine, prompts) for _ in range(4)])]:
            found = sorted(await first_tokens(engine, prompts, chosen.seconds, *traffic))
            median, mean = statistics.median(found), statistics.mean(found)
            chosen.results.add(f"images.text {name}", median / alone, "x", 1.2)
            print(f"  {name}: median {median:.1f} ms, {median / alone:.2f} x; mean {mean:.1f}, "
                  f"95 % below {found[len(found) * 95 // 100]:.1f} ms ({len(found)} texts)", flush=True)  # fmt: skip


def in_engine(chosen: argparse.Namespace) -> None:
    """The figures of --engine."""
    shape = SHAPES[chosen.model]
    n_layers = chosen.layers or shape.config.get("text_config", shape.config)["num_hidden_layers"]
    prompts = Prompts(shape)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape.with_layers(n_layers)))
        Path(folder, "preprocessor_config.json").write_text(json.dumps(shape.processor))
        options = {"model": folder, "device": chosen.device, "dtype": "bfloat16", "load_format": "dummy", "max_num_seqs": 64,
                   "skip_tokenizer_init": True, "max_model_len": 4096, "max_num_batched_tokens": 8192}  # fmt: skip
        with LLM(**options) as llm:

            def at_once() -> None:
                llm.generate([prompts.image() for _ in range(chosen.images)], ONE, use_tqdm=False)

            llm.generate([prompts.image() for _ in range(3)], ONE, use_tqdm=False)
            if chosen.profile:
                return profile(at_once, chosen.images)
            images = [timed(lambda: llm.generate([prompts.image()], ONE, use_tqdm=False)) for _ in range(chosen.runs)]
            texts = [timed(lambda: llm.generate([prompts.text(shape.features + 20)], ONE, use_tqdm=False)) for _ in images]
            image, text = (statistics.median(each) * 1e3 for each in (images, texts))
            chosen.results.add("images.alone", image, "ms")
            print(f"one image alone: {image:.1f} ms, a text of as many tokens: {text:.1f} ms")
            rates = [chosen.images / timed(at_once) for _ in range(3)]
            chosen.results.add(f"images.{chosen.images}", statistics.median(rates), "images/s")
            flop = shape.tower_flop, shape.text_flop(n_layers)
            print(f"{chosen.images} images of {shape.side} x {shape.side} at once: {statistics.median(rates):.1f} images/s; "
                  f"bound {1e12 * chosen.peak / sum(flop):.1f} by {flop[0] / 1e12:.2f} + {flop[1] / 1e12:.2f} TFLOP "
                  f"at {chosen.peak:g} TFLOP/s", flush=True)  # fmt: skip
        if chosen.seconds:
            asyncio.run(beside_texts(options, prompts, chosen))


def profile(call: Callable[[], object], n: int) -> None:
    """Times of the kernels by torch's profiler, an image."""
    import torch
    from cuda import print_kernels
    from torch.profiler import ProfilerActivity

    torch.cuda.init()
    call()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        seconds = timed(call)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(trace))
        print_kernels(json.loads(trace.read_text())["traceEvents"], n)
    print(f"{1e6 * seconds / n:.0f} us of wall time an image while recorded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--height", type=int, default=1080)
    parser.add_argument("--width", type=int, default=1920)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-vl")
    parser.add_argument("--layers", type=int, help="of the text; default: all")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--rates", type=lambda text: [float(each) for each in text.split(",")], default=[1, 4])
    parser.add_argument("--seconds", type=float, default=5, help="of texts for each traffic; 0: none")
    parser.add_argument("--peak", type=float, default=790, help="of the device, in TFLOP/s")
    parser.add_argument("--profile", action="store_true")
    results = Results("benchmarks/images.py", parser)
    chosen = parser.parse_args()
    chosen.results = results
    if chosen.engine:
        in_engine(chosen)
        return results.write(chosen)
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (chosen.height // 20, chosen.width // 20, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((chosen.width, chosen.height), Image.Resampling.BICUBIC)).astype(int)
    image = np.clip(smooth + rng.integers(-8, 9, smooth.shape), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=90)
    data, limits, pillow = buffer.getvalue(), Limits(), Image.fromarray(image)
    print(f"decode (Pillow), {len(data) >> 10} KiB: {least(lambda: decode(data, limits), chosen.runs):.1f} ms")
    height, width = sizes.by_area((chosen.height, chosen.width), 28, 3136, 1003520)
    for name, number in (("bilinear", 2), ("bicubic", 3), ("lanczos", 1)):
        fields = Fields({"resample": number}, "")
        ours = least(lambda fields=fields: resize(image, (height, width), fields), chosen.runs)  # type: ignore[misc]
        theirs = least(lambda number=number: pillow.resize((width, height), number), chosen.runs)  # type: ignore[misc]
        print(f"resize to {height} x {width}, {name}: {ours:.1f} ms, Pillow {theirs:.1f} ms: {theirs / ours:.1f} x")
    for name, (config, kind, fields) in KINDS.items():
        processor = Processor(config, {"image_processor_type": kind, **fields})
        item = processor.item(image)
        took = least(lambda processor=processor: processor.item(image), chosen.runs)  # type: ignore[misc]
        print(f"{name}: {len(item.rows)} rows, {item.n_tokens} tokens, with resize, patches and key: {took:.1f} ms")


if __name__ == "__main__":
    main()
