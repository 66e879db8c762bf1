"""How long an image takes before it reaches the engine, in processor time of one core, beside Pillow; and in the engine.

    python benchmarks/images.py [--height 1080] [--width 1920]
    python benchmarks/images.py --engine [--device cuda] [--layers 28] [--images 32]

The image is a smooth one with noise, as a JPEG of quality 90. Times are the least of --runs.

--engine: an engine of Qwen2.5-VL-7B's shape with random weights in bfloat16, images of 1024 x 1024 pixels, all different, from
arrays to the first token, their preparation included. One image alone, beside a text of as many tokens: the difference is the
tower's and the preparation's. Then images a second, and the first token of a text of 128 tokens alone and while four requests
with an image are in flight at any time. Medians over rounds.
"""

import argparse
import asyncio
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

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


SIDE, FEATURES, ID = 1024, 37 * 37, 151655
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "image_token_id": ID,
    "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vocab_size": 152064, "hidden_size": 3584,
    "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28,
    "max_position_embeddings": 128000, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "out_hidden_size": 3584, "patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "spatial_merge_size": 2, "temporal_patch_size": 2,
        "hidden_act": "silu"},
}  # fmt: skip
PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 3136, "longest_edge": 12845056}}
ONE = SamplingParams(temperature=0, max_tokens=1)


class Prompts:
    """Prompts that all differ."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.base = self.rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)

    def text(self, n: int) -> list[int]:
        return self.rng.integers(1000, 100000, n).tolist()

    def image(self) -> Any:
        """An image and some text."""
        pixels = np.roll(self.base, self.rng.integers(SIDE, size=2), (0, 1)) ^ np.uint8(self.rng.integers(256))
        return {"prompt_token_ids": [*self.text(4), *[ID] * FEATURES, *self.text(16)], "multi_modal_data": {"image": pixels}}


def timed(call: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


async def first_tokens(engine: AsyncEngine, prompts: Prompts, rounds: int, beside: int) -> list[float]:
    """Seconds to the first token of texts of 128 tokens, while so many requests with an image are in flight."""

    async def keep() -> None:
        while True:
            await engine.generate(prompts.image(), ONE)

    tasks = [asyncio.create_task(keep()) for _ in range(beside)]
    await asyncio.sleep(1 if beside else 0)
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        await engine.generate(prompts.text(128), ONE)
        found.append(time.perf_counter() - start)
        await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def beside_texts(options: dict[str, Any], prompts: Prompts, rounds: int) -> None:
    async with AsyncEngine.create(**options) as engine:
        await first_tokens(engine, prompts, 3, 1)
        alone, beside = [await first_tokens(engine, prompts, 3 * rounds, n) for n in (0, 4)]
    a, b = statistics.median(alone), statistics.median(beside)
    print(f"first token of a text of 128 tokens: alone {a * 1e3:.1f} ms, beside images {b * 1e3:.1f} ms "
          f"(largest {max(beside) * 1e3:.1f}): {b / a:.2f} x")  # fmt: skip


def in_engine(chosen: argparse.Namespace) -> None:
    """The figures of --engine."""
    prompts = Prompts()
    with tempfile.TemporaryDirectory() as folder:
        config = {**SHAPE, "num_hidden_layers": chosen.layers}
        Path(folder, "config.json").write_text(json.dumps(config))
        Path(folder, "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
        options = {"model": folder, "device": chosen.device, "dtype": "bfloat16", "load_format": "dummy", "max_num_seqs": 64,
                   "skip_tokenizer_init": True, "max_model_len": 4096, "max_num_batched_tokens": 8192}  # fmt: skip
        with LLM(**options) as llm:
            llm.generate([prompts.image() for _ in range(3)], ONE, use_tqdm=False)
            images = [timed(lambda: llm.generate([prompts.image()], ONE, use_tqdm=False)) for _ in range(chosen.runs)]
            texts = [timed(lambda: llm.generate([prompts.text(FEATURES + 20)], ONE, use_tqdm=False)) for _ in images]
            image, text = (statistics.median(each) * 1e3 for each in (images, texts))
            print(f"one image alone: {image:.1f} ms, a text of as many tokens: {text:.1f} ms")
            rates = []
            for _ in range(3):
                several = [prompts.image() for _ in range(chosen.images)]
                rates.append(chosen.images / timed(lambda several=several: llm.generate(several, ONE, use_tqdm=False)))
            print(f"{chosen.images} images of {SIDE} x {SIDE} at once: {statistics.median(rates):.1f} images/s")
        asyncio.run(beside_texts(options, prompts, chosen.runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--height", type=int, default=1080)
    parser.add_argument("--width", type=int, default=1920)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=28, help="of the text")
    parser.add_argument("--images", type=int, default=32)
    chosen = parser.parse_args()
    if chosen.engine:
        return in_engine(chosen)
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
