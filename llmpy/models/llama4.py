"""Llama 4, with its tower for images or without."""

from dataclasses import replace

from ..errors import CheckpointError
from . import heads, towers, usual
from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Llama 4 Scout and Maverick"


@architecture(
    *heads.names("Llama4"),
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500000.0,
        "num_local_experts": 16,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
    },
)
def llama4(cfg: ModelConfig, m: Model) -> None:
    """Llama 4 decoder: three of four layers have interleaved rope and attend within chunks.

    The other layers attend to all positions without rope, and their queries grow with the position. A mixture's weights
    multiply its experts' inputs; there is also a shared expert.
    """
    bias, chunk = cfg.get("attention_bias", False), cfg.get("attention_chunk_size", 8192)
    every, slope = cfg.size("floor_scale", 8192), cfg.positive("attn_scale", 0.1)
    grows = cfg.raw.get("attn_temperature_tuning") not in (False, 0) and cfg.served_length >= every
    rope, has_norm = replace(cfg.rope, interleaved=True), cfg.get("use_qk_norm", True)
    step, stem = cfg.size("interleave_moe_layer_step", 1), m.stem("model.", "embed_tokens")
    sparse = cfg.raw.get("moe_layers")
    if sparse is not None and not isinstance(sparse, list):
        raise CheckpointError(f"{cfg.file}: moe_layers: wanted a list of layers, have {sparse!r}", file=cfg.file)
    interval = cfg.size("no_rope_layer_interval", 4)
    turned = cfg.layer_flags("no_rope_layers", lambda i: (i + 1) % interval > 0)
    x = m.embed(f"{stem}embed_tokens")
    for i, (layer, is_turned) in enumerate(zip(m.layers(f"{stem}layers", cfg.num_layers), turned, strict=True)):
        q, k, v = usual.qkv(cfg, layer, layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps), bias=bias)
        if is_turned:
            q, k = layer.rope(q, k, rope)
            if has_norm:
                q, k = (layer.rms_norm(part, None, cfg.rms_norm_eps, per_head=True) for part in (q, k))
        elif grows:
            q = layer.scale_by_position(q, every, slope, first=1)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v, chunk=chunk if is_turned else 0), bias=bias)
        h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
        is_mixture = i in sparse if sparse is not None else (i + 1) % step == 0
        x = x + (mix(cfg, m, layer, h) if is_mixture else mlp(cfg, layer, h, "feed_forward", "intermediate_size_mlp"))
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)


def mlp(cfg: ModelConfig, layer: Block, x: Value, stem: str, width: str) -> Value:
    """A gated MLP; `width` names the field of its inner width."""
    names = [f"{stem}.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    return layer.gated_mlp(x, names[0], names[1], names[2], cfg.size(width, 1), act=cfg.hidden_act)


def mix(cfg: ModelConfig, m: Model, layer: Block, x: Value) -> Value:
    """The mixture plus the shared expert."""
    n_experts, n_chosen = cfg.size("num_local_experts", 16), cfg.size("num_experts_per_tok", 1)
    routes = layer.route(x, "feed_forward.router", n_experts, n_chosen, score="chosen_sigmoid")
    up, down, stacked = ["feed_forward.experts.gate_up_proj"], "feed_forward.experts.down_proj", "columns"
    if m.shape_of(f"{layer.prefix}feed_forward.experts.0.down_proj.weight"):  # quantised files have experts one by one
        up = [f"feed_forward.experts.#.{name}_proj" for name in ("gate", "up")]
        down, stacked = "feed_forward.experts.#.down_proj", ""
    y = layer.experts(
        x, routes, up, down, cfg.intermediate_size, act=cfg.hidden_act, stacked=stacked, input_scaled=True,
    )  # fmt: skip
    return y + mlp(cfg, layer, x, "feed_forward.shared_expert", "intermediate_size")


@architecture("Llama4ForConditionalGeneration", texts={"llama4_text": "Llama4ForCausalLM"})
def llama4_vision(cfg: ModelConfig, m: Model) -> None:
    """A tower for tiles, turned by the patches' columns and rows; patches joined through two MLPs, and the text model."""
    vision = cfg.sub("vision_config", {}, {"hidden_act": "gelu"})
    vision.only("vision_feature_select_strategy", "default")
    dim, patch, eps = vision.hidden_size, vision.size("patch_size", 14), 1e-5
    n_rows = (vision.size("image_size", 336) // patch) ** 2 + 1
    v = m.tower(vision, towers.prefix(m, "class_embedding", ("vision_model.", "model.vision_model.")), towers.feature_id(cfg))
    x = v.linear(v.pixels(towers.byte_table(cfg, towers.HALVES, in_bfloat16=True), 3 * patch**2), "patch_embedding.linear", dim)
    x = v.rows(x, "class", weight="class_embedding") + v.embed_taps("positional_embedding_vlm", (n_rows, dim))
    x = v.layer_norm(x, "layernorm_pre", eps)
    turn = v.axial_rope(vision.head_dim, towers.theta(vision), axes=(1, 0), interleaved=True)
    for block in v.layers("model.layers", vision.num_layers):
        h = block.layer_norm(x, "input_layernorm", eps)
        q, k, u = block.linear(h, [f"self_attn.{name}_proj" for name in "qkv"], [dim] * 3, bias=True)
        q, k = block.rope(q, k, turn)
        x = x + block.linear(block.row_attention(q, k, u), "self_attn.o_proj", dim, bias=True)
        h = block.layer_norm(x, "post_attention_layernorm", eps)
        x = x + block.mlp(h, "mlp.fc1", "mlp.fc2", vision.intermediate_size, act=vision.hidden_act)
    n_joined = round(1 / vision.positive("pixel_shuffle_ratio", 0.5)) ** 2
    x = v.group(v.rows(v.layer_norm(x, "layernorm_post", eps), "patches"), n_joined)
    x = v.act(v.linear(x, "vision_adapter.mlp.fc1", vision.size("projector_input_dim", 4096)), "gelu")
    x = v.act(v.linear(x, "vision_adapter.mlp.fc2", vision.size("projector_output_dim", 4096)), "gelu")
    p = v.at(towers.prefix(m, "linear_1.weight", ("multi_modal_projector.", "model.multi_modal_projector.")))
    v.features(p.linear(x, "linear_1", cfg.hidden_size, bias=vision.get("multi_modal_projector_bias", False)))
    towers.text(cfg, m)
