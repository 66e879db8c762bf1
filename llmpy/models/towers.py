"""What the families that take images share: the names of their parts, the numbers of bytes, and layers of their towers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import CheckpointError, UnsupportedError
from ..vision import processors
from ..vision.fields import Fields
from . import registry
from .blocks import Block, Model, Value
from .config import ModelConfig
from .program import Spec, Weight
from .rope import Floats

CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
"""Mean and standard deviation of the channels for models of CLIP."""
HALVES = ([0.5] * 3, [0.5] * 3)
"""The same for models of SigLIP and later."""

_TEXTS = (
    ("language_model.model.", "language_model.lm_head"),
    ("model.language_model.", "lm_head"),
    ("model.text_model.", "lm_head"),
    ("model.", "lm_head"),
)


def text(cfg: ModelConfig, m: Model) -> None:
    """Writes the text's program with the names that the checkpoint has."""
    body, head = next((names for names in _TEXTS if m.has(f"{names[0]}embed_tokens.weight")), _TEXTS[0])
    m.renames = (("model.", body), ("lm_head", head), ("output", head.replace("lm_head", "output")))
    registry.find(cfg.architecture).text(cfg.raw).build(cfg, m)


def prefix(m: Model, name: str, candidates: Sequence[str]) -> str:
    """The first of the candidates with which the checkpoint has a tensor; the first one without a checkpoint."""
    return next((each for each in candidates if m.has(each + name)), candidates[0])


def feature_id(cfg: ModelConfig) -> int:
    """The token that stands for a feature."""
    name = "image_token_index" if cfg.raw.get("image_token_index") is not None else "image_token_id"
    return cfg.need(name, int)


def byte_table(cfg: ModelConfig, usual: tuple[Sequence[float], Sequence[float]], *, in_bfloat16: bool = False) -> Floats:
    """float32 [3, 256]: the number of each byte by channel, as the model's processor rescales and normalises it.

    Args:
        cfg: The model's configuration, with that of its processor.
        usual: Mean and standard deviation that the processor's configuration may leave out.
        in_bfloat16: Whether the processor rounds every result to bfloat16.
    """
    mean, std = map(list, usual)
    fields = {**processors.ALWAYS, "image_mean": mean, "image_std": std, **cfg.processor, "in_bfloat16": in_bfloat16}
    for name in ("image_mean", "image_std"):
        if not isinstance(fields[name], list):
            raise CheckpointError(f"{cfg.file}: the processor's {name}: wanted 3 numbers, have {fields[name]}")
    return np.ascontiguousarray(processors.normalisation(Fields(fields, cfg.file)))


def layer_numbers(cfg: ModelConfig, n_layers: int) -> list[int]:
    """The layers of the tower, counted from 1, behind which `vision_feature_layer` takes rows: one layer, or a list."""
    given: Any = cfg.raw.get("vision_feature_layer", -2)
    every: list[int] = given if isinstance(given, list) else [given]
    if not every or any(type(each) is not int for each in every):
        raise UnsupportedError(f"{cfg.file}: vision_feature_layer={given!r} is not supported, only a layer or a list of layers")
    numbers = [each + n_layers + 1 if each < 0 else each for each in every]
    if not all(1 <= number <= n_layers for number in numbers):
        raise CheckpointError(f"{cfg.file}: vision_feature_layer: wanted one of {n_layers} layers, have {given}", file=cfg.file)
    return numbers


def theta(vision: ModelConfig) -> float:
    """Base of the tower's rotation."""
    given = vision.raw.get("rope_parameters")
    found = given.get("rope_theta") if isinstance(given, dict) else vision.raw.get("rope_theta")
    return float(found) if isinstance(found, int | float) else 10000.0


def siglip(cfg: ModelConfig, vision: ModelConfig, v: Model) -> Value:
    """The rows of SigLIP behind its last norm; there are no class rows."""
    dim, patch, eps = vision.hidden_size, vision.size("patch_size", 14), vision.get("layer_norm_eps", 1e-6)
    n_rows = (vision.size("image_size", 224) // patch) ** 2
    x = v.linear(v.pixels(byte_table(cfg, HALVES), 3 * patch**2), "embeddings.patch_embedding", dim, bias=True)
    x = x + v.embed_taps("embeddings.position_embedding.weight", (n_rows, dim))
    for block in v.layers("encoder.layers", vision.num_layers):
        x = layer(block, vision, x, ("layer_norm1", "layer_norm2"), eps)
    return v.layer_norm(x, "post_layernorm", eps)


def layer(block: Block, cfg: ModelConfig, x: Value, norms: Sequence[str], eps: float) -> Value:
    """A layer of CLIP or SigLIP: attention and MLP behind a norm each, all with biases."""
    h = block.layer_norm(x, norms[0], eps)
    q, k, v = block.linear(h, [f"self_attn.{name}_proj" for name in "qkv"], [x.width] * 3, bias=True)
    x = x + block.linear(block.row_attention(q, k, v), "self_attn.out_proj", x.width, bias=True)
    h = block.layer_norm(x, norms[1], eps)
    return x + block.mlp(h, "mlp.fc1", "mlp.fc2", cfg.intermediate_size, act=cfg.hidden_act)


def leave_out(spec: Spec) -> None:
    """Takes the towers, their weights and what reads their features out of a program; texts keep their bits.

    The tensors of these weights are ignored from then on, also by updates.
    """
    behind: dict[int, int] = {}  # what a splice gives -> what it reads
    for name, op in spec["ops"]:
        if name == "splice":
            behind[op["out"][0]] = behind.get(op["in"][0], op["in"][0])
    del spec["towers"]
    spec["ops"][:] = [each for each in spec["ops"] if each[0] != "splice"]
    spec["values"][:] = [(width, behind.get(of, of), offset) for width, of, offset in spec["values"]]
    kept = sorted({number for _, op in spec["ops"] for number in op["weights"] if number >= 0})
    numbers = {old: new for new, old in enumerate(kept)}
    for _, op in spec["ops"]:
        op["in"] = [behind.get(number, number) for number in op["in"]]
        op["weights"] = [numbers.get(number, number) for number in op["weights"]]
    spec["ignored"] += [name for i, weight in enumerate(spec["weights"]) if i not in numbers for name in _names(weight)]
    spec["weights"][:] = [spec["weights"][number] for number in kept]


def _names(weight: Weight) -> set[str]:
    return {name for part in weight["parts"] for name in (part.name, part.source)}
