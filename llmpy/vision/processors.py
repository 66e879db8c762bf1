"""Which families of models take images, how their processors cut them, and what their towers want: one row each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import CheckpointError, UnsupportedError
from ..json_files import read_json
from ..weights.bfloat16 import rounded
from . import cuts, prompts
from .fields import Fields, merged
from .pages import PageTower, make_page
from .towers import Tower, make_item

if TYPE_CHECKING:
    import numpy.typing as npt

    from .cuts import Cut, Pixels
    from .items import ImageItem
    from .prompts import Expansion
    from .sizes import Size

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
ALWAYS = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "resample": BICUBIC}
CROPPED = {"size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}}
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
TILED = {**HALF, "resample": LANCZOS, "size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364},
         "do_image_splitting": True}  # fmt: skip
PANNED = {"pan_and_scan_min_crop_size": 256, "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2}


class Kind(NamedTuple):
    """A class of processors of transformers: how it cuts, and the fields that it has if the file leaves them out."""

    cut: Callable[[Pixels, int, Fields], Cut]
    defaults: Mapping[str, Any]


KINDS = {
    "CLIPImageProcessor": Kind(cuts.plain, {**CLIP, **CROPPED}),
    "LlavaImageProcessor": Kind(cuts.plain, {**CLIP, **CROPPED, "pads_to_square": True}),
    "SiglipImageProcessor": Kind(cuts.plain, {**HALF, "size": {"height": 224, "width": 224}}),
    "LlavaNextImageProcessor": Kind(cuts.best_canvas, {**CLIP, **CROPPED, "image_grid_pinpoints": PINPOINTS}),
    "Qwen2VLImageProcessor": Kind(cuts.by_area, {**CLIP, "size": {"shortest_edge": 3136, "longest_edge": 1003520}}),
    "Gemma3ImageProcessor": Kind(
        cuts.with_crops, {**HALF, **PANNED, "resample": BILINEAR, "size": {"height": 224, "width": 224}}
    ),
    "GotOcr2ImageProcessor": Kind(
        cuts.nearest_grid, {**CLIP, "size": {"height": 384, "width": 384}, "min_patches": 1, "max_patches": 12}
    ),
    "PixtralImageProcessor": Kind(cuts.by_longest, {**CLIP, "size": {"longest_edge": 1024}}),
    "Idefics3ImageProcessor": Kind(cuts.up_to_tiles, TILED),
    "SmolVLMImageProcessor": Kind(cuts.up_to_tiles, TILED),
    "Llama4ImageProcessor": Kind(cuts.fitting_canvas, {
        **HALF, "resample": BILINEAR, "size": {"height": 336, "width": 336}, "max_patches": 16, "in_bfloat16": True,
    }),
    "DeepseekVLV2Processor": Kind(cuts.page, {**HALF, "tile_size": 640, "size": 1024, "min_patches": 2, "max_patches": 9}),
}
"""Kinds by `image_processor_type`, without the suffixes Fast and Pil."""


class Vision:
    """Fields of a model's configuration and of its vision part; a wrong one raises CheckpointError.

    Args:
        config: The model's config.json.
        file: Its name, for messages.
    """

    def __init__(self, config: Mapping[str, Any], file: str) -> None:
        part = config.get("vision_config")
        self.all = Fields(config, file)
        self.vision = Fields(part if isinstance(part, Mapping) else {}, f"{file}: vision_config")

    def side(self, name: str, default: int | None = None) -> int:
        """A size of the vision part; of a height and a width that are equal, one."""
        value = self.vision[name]
        if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
            value = value[0]
        return Fields({name: default if value is None else value}, self.vision.file).count(name)

    @property
    def patches_of_a_side(self) -> int:
        """Patches along a side of the image that the tower was made for."""
        return self.side("image_size") // self.side("patch_size")


def _llava(c: Vision, **more: Any) -> Tower:
    """CLIP has class rows, SigLIP has none."""
    has_class = c.vision["model_type"] in (None, "clip_vision_model")
    strategy = c.all["vision_feature_select_strategy"] or "default"
    names = {("default", True): "patches", ("full", True): "full", ("default", False): "rest", ("full", False): "all"}
    if (strategy, has_class) not in names:
        raise c.all.wrong("vision_feature_select_strategy", "default or full", strategy)
    default = {"image_size": 336, "patch_size": 14} if has_class else {}
    patch, image = (c.side(name, default.get(name)) for name in ("patch_size", "image_size"))
    return Tower(patch, 1, has_class, image // patch, select=names[strategy, has_class], **more)


def _llava_or_pixtral(c: Vision) -> Tower:
    return _pixtral(c) if c.vision["model_type"] == "pixtral" else _llava(c)


def _llava_next(c: Vision) -> Tower:
    tower = _llava(c, joins=True)
    if tower.select not in ("patches", "all"):
        raise UnsupportedError("images: LLaVA-NeXT with class rows among its features is not supported; "
                               "vision_feature_select_strategy must be 'default' with CLIP and 'full' with SigLIP")  # fmt: skip
    return tower


def _pixtral(c: Vision) -> Tower:
    merge = c.all["spatial_merge_size"]
    return Tower(c.side("patch_size", 16), 1 if merge is None else c.all.count("spatial_merge_size", 64), has_axes=True)


def _qwen(c: Vision) -> Tower:
    return Tower(c.side("patch_size", 14), c.side("spatial_merge_size", 2), has_axes=True)


def _qwen25(c: Vision) -> Tower:
    patch, merge = c.side("patch_size", 14), c.side("spatial_merge_size", 2)
    return Tower(patch, merge, has_axes=True, window=max(c.side("window_size", 112) // merge // patch, 1))


def _qwen3(c: Vision) -> Tower:
    side = math.isqrt(c.side("num_position_embeddings", 2304))
    return Tower(c.side("patch_size", 16), c.side("spatial_merge_size", 2), side=side, blends=True, has_axes=True)


def _gemma3(c: Vision) -> Tower:
    tokens = c.all["mm_tokens_per_image"]
    cells = math.isqrt(256 if tokens is None else c.all.count("mm_tokens_per_image"))
    return Tower(c.side("patch_size"), max(c.patches_of_a_side // cells, 1), side=c.patches_of_a_side)


def _siglip(c: Vision) -> Tower:
    return Tower(c.side("patch_size", 14), side=c.side("image_size", 224) // c.side("patch_size", 14))


def _internvl(c: Vision) -> Tower:
    ratio = 0.5 if c.all["downsample_ratio"] is None else c.all.number("downsample_ratio")
    select = "patches" if (c.all["vision_feature_select_strategy"] or "default") == "default" else "full"
    return Tower(c.side("patch_size", 14), int(1 / ratio), True, c.side("image_size", 448) // c.side("patch_size", 14),
                 select=select)  # fmt: skip


def _idefics3(c: Vision) -> Tower:
    scale = 2 if c.all["scale_factor"] is None else c.all.count("scale_factor", 64)
    return Tower(c.side("patch_size"), scale, side=c.patches_of_a_side)


def _llama4(c: Vision) -> Tower:
    ratio = 0.5 if c.vision["pixel_shuffle_ratio"] is None else c.vision.number("pixel_shuffle_ratio")
    patch = c.side("patch_size", 14)
    return Tower(patch, round(1 / ratio), True, c.side("image_size", 448) // patch, has_axes=True, class_last=True,
                 select="patches")  # fmt: skip


def _page(c: Vision) -> PageTower:
    """DeepSeek-OCR: two encoders, whose sizes lie in vision_config.width."""
    widths = c.vision["width"] if isinstance(c.vision["width"], Mapping) else {}
    sam, clip = (Fields({**usual, **widths.get(name, {})}, c.vision.file) for name, usual in (
        ("sam_vit_b", {"patch_size": 16, "window_size": 14}), ("clip-l-14-224", {"patch_size": 14, "image_size": 224})))
    patch = sam.count("patch_size")
    return PageTower(patch, c.side("image_size", 1024) // patch, sam.count("window_size"),
                     clip.count("image_size") // clip.count("patch_size"))  # fmt: skip


class Family(NamedTuple):
    """How a family of models takes images.

    Args:
        tower: What the tower wants, from the configuration.
        expansion: What stands for an image in a prompt.
        make: Makes the item of a cut image.
    """

    tower: Callable[[Vision], Any]
    expansion: Callable[[Fields], Expansion]
    make: Callable[[Cut, Size, Any, bytes], ImageItem] = make_item


FAMILIES = {
    "llava": Family(_llava_or_pixtral, prompts.llava),
    "llava_next": Family(_llava_next, prompts.repeated),
    "qwen2_vl": Family(_qwen, prompts.repeated),
    "qwen2_5_vl": Family(_qwen25, prompts.repeated),
    "qwen3_vl": Family(_qwen3, prompts.repeated),
    "qwen3_vl_moe": Family(_qwen3, prompts.repeated),
    "gemma3": Family(_gemma3, prompts.gemma3),
    "paligemma": Family(_siglip, prompts.paligemma),
    "internvl": Family(_internvl, prompts.internvl),
    "idefics3": Family(_idefics3, prompts.idefics3),
    "smolvlm": Family(_idefics3, prompts.idefics3),
    "mistral3": Family(_pixtral, prompts.pixtral),
    "llama4": Family(_llama4, prompts.llama4),
    "deepseek_vl_v2": Family(_page, prompts.repeated, make_page),
}
"""Families by the configuration's `model_type`."""


class Processor:
    """Makes items of images for one model.

    Args:
        config: The model's config.json.
        stored: Fields of the processor of images.
        given: mm_processor_kwargs; None = none.
        file: Name of the file that `stored` was read from, for messages.

    Attributes:
        family: How the family takes images.
        tower: What the tower wants.
        table: Value of each byte in each channel, float32 [3, 256].
        expansion: What stands for an image in a prompt.
        seed: What every content key of the processor depends on.

    Raises:
        CheckpointError: A field is missing or wrong.
        ConfigError: A key of mm_processor_kwargs is wrong.
        UnsupportedError: The family or the class of the processor is not supported.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        stored: Mapping[str, Any],
        given: Mapping[str, object] | None = None,
        file: str = "the processor",
    ) -> None:
        name = str(config.get("model_type"))
        if name not in FAMILIES:
            raise UnsupportedError(f"images: models of type {name!r} take no images here; {', '.join(FAMILIES)} do")
        self.family = FAMILIES[name]
        self.kind = _kind(stored, file)
        self.fields = Fields(merged({**ALWAYS, **self.kind.defaults}, stored, given or {}), file)
        vision = Vision(config, "config.json")
        self.tower = self.family.tower(vision)
        self.expansion = self.family.expansion(vision.all)
        self.table = normalisation(self.fields)
        self.seed = json.dumps([name, asdict(self.tower), self.fields.values], sort_keys=True, default=str).encode()

    def item(self, image: Pixels) -> ImageItem:
        """The item of a decoded image.

        Args:
            image: uint8 [height, width, 3].
        """
        size = image.shape[0], image.shape[1]
        return self.family.make(self.kind.cut(image, self.tower.factor, self.fields), size, self.tower, self.seed)


def _kind(stored: Mapping[str, Any], file: str) -> Kind:
    name = str(stored.get("image_processor_type") or stored.get("feature_extractor_type"))
    short = name.removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    if short not in KINDS:
        raise UnsupportedError(f"{file}: image_processor_type {name!r} is not supported; {', '.join(KINDS)} are")
    return KINDS[short]


def normalisation(fields: Fields) -> npt.NDArray[np.float32]:
    """The value of each byte in each channel: rescaled in float64, then normalised in float32, as transformers does."""
    if fields.flag("in_bfloat16"):
        return _in_bfloat16(fields)
    values = np.arange(256, dtype=np.float64)
    scaled = (values * fields.number("rescale_factor") if fields.flag("do_rescale") else values).astype(np.float32)
    if not fields.flag("do_normalize"):
        return np.stack([scaled] * 3)
    means, deviations = (np.array(fields.numbers(name), np.float32)[:, None] for name in ("image_mean", "image_std"))
    return (scaled - means) / deviations


def _in_bfloat16(fields: Fields) -> npt.NDArray[np.float32]:
    """The same with every result rounded to bfloat16, as Llama 4's processor does."""
    scaled = rounded(np.arange(256, dtype=np.float32) * np.float32(fields.number("rescale_factor")))
    means, deviations = (rounded(np.array(fields.numbers(name), np.float32))[:, None] for name in ("image_mean", "image_std"))
    return rounded(rounded(scaled - means) / deviations)


def stored(folder: Path, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """The file of a model's folder that has fields of the processor, and the fields; None: there is none.

    Args:
        folder: Folder of the model's files.
        config: The model's config.json; `image_processor` in it comes first (internvl_chat.py).
    """
    if isinstance(own := config.get("image_processor"), Mapping):
        return "config.json", own
    for name, part in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        found = read_json(Path(folder, name), absent=dict)
        fields = found if part is None else found.get(part)
        if isinstance(fields, Mapping) and fields:
            return name, fields
        if found.get("processor_class") in KINDS:  # the processor of images and text has the fields itself
            return name, {"image_processor_type": found["processor_class"], **found}
    return None


def load(folder: Path, config: Mapping[str, Any], given: Mapping[str, object]) -> Processor:
    """The processor of a model's folder.

    Args:
        folder: Folder of the model's files.
        config: The model's config.json.
        given: mm_processor_kwargs.

    Raises:
        CheckpointError: There is no file with fields of the processor.
    """
    if found := stored(folder, config):
        name, fields = found
        return Processor(config, fields, given, name)
    raise CheckpointError(
        f"{folder}: has neither preprocessor_config.json nor processor_config.json with an image_processor; "
        "copy one of them there",
        file=str(folder),
    )
