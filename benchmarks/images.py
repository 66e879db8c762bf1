"""How long an image takes before it reaches the engine, in processor time of one core, beside Pillow.

    python benchmarks/images.py [--height 1080] [--width 1920]

The image is a smooth one with noise, as a JPEG of quality 90. Times are the least of --runs.
"""

import argparse
import io
import time
from collections.abc import Callable

import numpy as np
from PIL import Image

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--height", type=int, default=1080)
    parser.add_argument("--width", type=int, default=1920)
    parser.add_argument("--runs", type=int, default=15)
    chosen = parser.parse_args()
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
