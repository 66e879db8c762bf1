"""The config.json of OpenGVLab's own InternVL repositories (InternVLChatModel), in the words of transformers' InternVL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from ..json_files import read_json

ARCHITECTURE = "InternVLChatModel"
FEATURE = "<IMG_CONTEXT>"
_USUAL = {"ps_version": "v2", "use_thumbnail": True, "pad2square": False, "use_backbone_lora": 0, "use_llm_lora": 0}
_VISION = {"qkv_bias": "attention_bias", "qk_normalization": "use_qk_norm"}


def translated(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The fields of a model's config.json, and of the image processor, which these repositories have in code.

    Args:
        raw: The fields of config.json.
        folder: The model's folder. Its tokenizer has the id of the token that stands for a feature.

    Raises:
        UnsupportedError: A field has a value that no InternVL from 2 on has.
    """
    for name, usual in _USUAL.items():
        if raw.get(name, usual) != usual:
            raise UnsupportedError(f"config.json: {name}={raw[name]!r} of {ARCHITECTURE} is not supported; only {usual!r} is")
    vision = raw.get("vision_config")
    vision = dict(vision) if isinstance(vision, Mapping) else {}
    side = raw.get("force_image_size") or vision.get("image_size", 448)
    text = raw.get("llm_config")
    found = {
        **raw,
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "text_config": text,
        "vision_config": {**vision, "image_size": side, **{new: vision[old] for old, new in _VISION.items() if old in vision}},
        "vision_feature_layer": raw.get("select_layer", -1),
        "image_processor": {
            "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": side, "width": side},
            "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
            "crop_to_patches": raw.get("dynamic_image_size", False),
            "min_patches": raw.get("min_dynamic_patch", 1), "max_patches": raw.get("max_dynamic_patch", 6),
        },
    }  # fmt: skip
    if isinstance(text, Mapping):
        found["tie_word_embeddings"] = text.get("tie_word_embeddings", False)
    if raw.get("image_token_id") is None and (number := _id_of(FEATURE, folder)) is not None:
        found["image_token_id"] = number
    return found


def _id_of(token: str, folder: Path) -> int | None:
    """The id of an added token of the folder's tokenizer."""
    entries = read_json(folder / "tokenizer.json", absent=dict).get("added_tokens")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping) and entry.get("content") == token and isinstance(entry.get("id"), int):
            return int(entry["id"])
    number = read_json(folder / "added_tokens.json", absent=dict).get(token)
    return number if isinstance(number, int) else None
