"""InternVL 2.5, 3 and 3.5: InternViT, whose branches have learned factors, before a Qwen2, Qwen3, InternLM2 or Llama."""

from typing import NamedTuple

from . import towers
from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "InternVL2.5 1B to 78B; InternVL3 1B to 78B and InternVL3.5"

_STEMS = ("vision_tower.", "model.vision_tower.")
_TEXTS = {
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "internlm2": "InternLM2ForCausalLM", "llama": "LlamaForCausalLM",
}  # fmt: skip


class _Names(NamedTuple):
    """Names of the tower's and the projector's parts."""

    class_row: str
    patches: str
    positions: str
    layers: str
    norms: tuple[str, str]
    qkv: str | list[str]
    qk_norms: tuple[str, str]
    projection: str
    factors: tuple[str, str]
    projector: tuple[str, str, str]


_TRANSFORMERS = _Names(
    "embeddings.cls_token", "embeddings.patch_embeddings.projection", "embeddings.position_embeddings", "encoder.layer",
    ("layernorm_before", "layernorm_after"), [f"attention.{name}_proj" for name in "qkv"],
    ("attention.q_norm", "attention.k_norm"), "attention.projection_layer", ("lambda_1", "lambda_2"),
    ("layer_norm", "linear_1", "linear_2"),
)  # fmt: skip
_OPENGVLAB = _Names(
    "embeddings.class_embedding", "embeddings.patch_embedding", "embeddings.position_embedding", "encoder.layers",
    ("norm1", "norm2"), "attn.qkv", ("attn.q_norm", "attn.k_norm"), "attn.proj", ("ls1", "ls2"), ("0", "1", "3"),
)  # fmt: skip


def _side(value: object) -> int:
    return int(value[0]) if isinstance(value, list) else int(str(value))


def _norm(vision: ModelConfig, block: Block, x: Value, name: str) -> Value:
    norm = block.rms_norm if vision.get("norm_type", "layer_norm") == "rms_norm" else block.layer_norm
    return norm(x, name, vision.get("layer_norm_eps", 1e-6))


@architecture("InternVLForConditionalGeneration", texts=_TEXTS, defaults={"vision_feature_layer": -1})
def internvl(cfg: ModelConfig, m: Model) -> None:
    """InternViT without a last norm; four patches joined, a norm and two linears."""
    if "llm_config" in cfg.raw:  # a configuration that vision/internvl_chat.py has translated
        names, stem, joined = _OPENGVLAB, "vision_model.", "mlp1."
    else:
        names, stem = _TRANSFORMERS, towers.prefix(m, _TRANSFORMERS.class_row, _STEMS)
        joined = towers.prefix(m, "linear_1.weight", ("multi_modal_projector.", "model.multi_modal_projector."))
    vision = cfg.sub("vision_config", {}, {})
    cfg.only("vision_feature_layer", -1)
    cfg.only("vision_feature_select_strategy", "default")
    vision.only("use_mean_pooling", True)
    vision.without("use_mask_token")
    v = m.tower(vision, stem, towers.feature_id(cfg))
    dim, patch = vision.hidden_size, _side(vision.raw.get("patch_size", 14))
    n_rows = (_side(vision.raw.get("image_size", 448)) // patch) ** 2 + 1
    table = towers.byte_table(cfg, ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    x = v.linear(v.pixels(table, 3 * patch**2), names.patches, dim, bias=True)
    x = v.rows(x, "class", weight=names.class_row, shape=(1, 1, dim))
    x = x + v.embed_taps(names.positions, (1, n_rows, dim))
    for block in v.layers(names.layers, vision.num_layers):
        x = _layer(vision, block, x, names)
    x = v.group(v.rows(x, "patches"), round(1 / cfg.positive("downsample_ratio", 0.5)) ** 2)
    p, (norm, first, second) = v.at(joined), names.projector
    h = p.linear(p.layer_norm(x, norm, 1e-5), first, cfg.hidden_size, bias=True)
    v.features(p.linear(p.act(h, cfg.get("projector_hidden_act", "gelu")), second, cfg.hidden_size, bias=True))
    towers.text(cfg, m)


def _layer(vision: ModelConfig, block: Block, x: Value, names: _Names) -> Value:
    """One layer of the tower."""
    dim, eps = vision.hidden_size, vision.get("layer_norm_eps", 1e-6)
    h = _norm(vision, block, x, names.norms[0])
    q, k, u = block.linear(h, names.qkv, [dim] * 3, bias=vision.get("attention_bias", False))
    if vision.get("use_qk_norm", False):
        q, k = (block.rms_norm(each, name, eps) for each, name in zip((q, k), names.qk_norms, strict=True))
    h = block.linear(block.row_attention(q, k, u), names.projection, dim, bias=True)
    x = x + block.scale_by(h, names.factors[0])
    h = _norm(vision, block, x, names.norms[1])
    h = block.mlp(h, "mlp.fc1", "mlp.fc2", vision.intermediate_size, act=vision.get("hidden_act", "gelu"))
    return x + block.scale_by(h, names.factors[1])
