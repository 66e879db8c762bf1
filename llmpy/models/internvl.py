"""InternVL 3 and 3.5 (-hf files): InternViT, whose branches have learned factors, and a text model of Qwen2, Qwen3 or Llama."""

from . import towers
from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "InternVL3 1B to 78B and InternVL3.5"
LIMITS = "files with names of transformers (-hf); those of InternVLChatModel are refused"

_STEMS = ("vision_tower.", "model.vision_tower.")
_TEXTS = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def _side(value: object) -> int:
    return int(value[0]) if isinstance(value, list) else int(str(value))


def _norm(vision: ModelConfig, block: Block, x: Value, name: str) -> Value:
    norm = block.rms_norm if vision.get("norm_type", "layer_norm") == "rms_norm" else block.layer_norm
    return norm(x, name, vision.get("layer_norm_eps", 1e-6))


@architecture("InternVLForConditionalGeneration", texts=_TEXTS, defaults={"vision_feature_layer": -1})
def internvl(cfg: ModelConfig, m: Model) -> None:
    """InternViT without a last norm; four patches joined, a norm and two linears."""
    vision = cfg.sub("vision_config", {}, {})
    cfg.only("vision_feature_layer", -1)
    cfg.only("vision_feature_select_strategy", "default")
    vision.only("use_mean_pooling", True)
    vision.without("use_mask_token")
    v = m.tower(vision, towers.prefix(m, "embeddings.cls_token", _STEMS), towers.feature_id(cfg))
    dim, patch = vision.hidden_size, _side(vision.raw.get("patch_size", 14))
    n_rows = (_side(vision.raw.get("image_size", 448)) // patch) ** 2 + 1
    table = towers.byte_table(cfg, ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    x = v.linear(v.pixels(table, 3 * patch**2), "embeddings.patch_embeddings.projection", dim, bias=True)
    x = v.rows(x, "class", weight="embeddings.cls_token", shape=(1, 1, dim))
    x = x + v.embed_taps("embeddings.position_embeddings", (1, n_rows, dim))
    bias, eps = vision.get("attention_bias", False), vision.get("layer_norm_eps", 1e-6)
    for block in v.layers("encoder.layer", vision.num_layers):
        h = _norm(vision, block, x, "layernorm_before")
        q, k, u = block.linear(h, [f"attention.{name}_proj" for name in "qkv"], [dim] * 3, bias=bias)
        if vision.get("use_qk_norm", False):
            q, k = block.rms_norm(q, "attention.q_norm", eps), block.rms_norm(k, "attention.k_norm", eps)
        h = block.linear(block.row_attention(q, k, u), "attention.projection_layer", dim, bias=True)
        x = x + block.scale_by(h, "lambda_1")
        h = _norm(vision, block, x, "layernorm_after")
        h = block.mlp(h, "mlp.fc1", "mlp.fc2", vision.intermediate_size, act=vision.get("hidden_act", "gelu"))
        x = x + block.scale_by(h, "lambda_2")
    x = v.group(v.rows(x, "patches"), round(1 / cfg.positive("downsample_ratio", 0.5)) ** 2)
    p = v.at(towers.prefix(m, "linear_1.weight", ("multi_modal_projector.", "model.multi_modal_projector.")))
    h = p.linear(p.layer_norm(x, "layer_norm", 1e-5), "linear_1", cfg.hidden_size, bias=True)
    v.features(p.linear(p.act(h, cfg.get("projector_hidden_act", "gelu")), "linear_2", cfg.hidden_size, bias=True))
    towers.text(cfg, m)
