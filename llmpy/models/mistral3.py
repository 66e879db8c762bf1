"""Mistral Small 3.1 and 3.2: the tower of Pixtral, whose patches are joined by a matrix, and Mistral."""

import numpy as np

from . import llava, towers
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Mistral Small 3.1 and 3.2 24B"
LIMITS = "files with names of transformers; consolidated.safetensors is not read"

_TEXTS = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}


@architecture("Mistral3ForConditionalGeneration", texts=_TEXTS,
              defaults={"vision_feature_layer": -1, "multimodal_projector_bias": False})  # fmt: skip
def mistral3(cfg: ModelConfig, m: Model) -> None:
    """Pixtral's tower, a norm, spatial_merge_size^2 patches joined, and two linears."""
    vision, n = cfg.sub("vision_config", {}, {"hidden_act": "silu"}), cfg.size("spatial_merge_size", 2) ** 2
    v = m.tower(vision, towers.prefix(m, "patch_conv.weight", ("vision_tower.", "model.vision_tower.")), towers.feature_id(cfg))
    p = v.at(towers.prefix(m, "norm.weight", ("multi_modal_projector.", "model.multi_modal_projector.")))
    x = v.group(p.rms_norm(llava.pixtral(cfg, vision, v), "norm", cfg.rms_norm_eps), n)
    order = np.arange(x.width).reshape(n, -1).T.reshape(-1)  # the matrix has the columns channel by channel
    x = v.emit("take", [x], x.width, weights=[v.constant(order.tolist())])
    x = p.linear(x, "patch_merger.merging_layer", vision.hidden_size)
    v.features(llava.project(cfg, m, v, x))
    towers.text(cfg, m)
