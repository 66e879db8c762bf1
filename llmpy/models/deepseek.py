"""DeepSeek-V2, V3 and R1: latent attention, and mixtures of experts after some dense layers."""

import math
from dataclasses import replace

from ..errors import UnsupportedError
from . import heads, mixture, usual
from .block_mixture import Routing
from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture
from .rope import Parameters, Rope

CHECKPOINTS = "DeepSeek-V2, DeepSeek-V2-Lite, DeepSeek-V3, DeepSeek-R1"
LIMITS = "V3 and R1 are released in FP8 and run as they are; layers that predict further tokens only draft (`mtp`)"
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1407,
    "max_position_embeddings": 2048,
}
NORM_EPS = 1e-6  # for the norms inside attention; rms_norm_eps does not apply to them


@architecture(*heads.names("DeepseekV2"), defaults=DEFAULTS)
def deepseek_v2(cfg: ModelConfig, m: Model) -> None:
    """DeepSeek-V2 decoder."""
    method = cfg.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedError(f"{cfg.file}: topk_method={method!r} is not supported by {cfg.architecture}")
    cfg.without("norm_topk_prob")
    groups = (1, 1) if method == "greedy" else (cfg.size("n_group", 1), cfg.size("topk_group", 1))
    routing: Routing = {"score": "softmax", "groups": groups, "scale": cfg.get("routed_scaling_factor", 1.0)}
    has_latents = cfg.get("use_mla", True)
    rope = replace(cfg.rope_of(cfg.size("qk_rope_head_dim", 64)), interleaved=True) if has_latents else cfg.rope
    write(cfg, m, rope, routing)


@architecture(
    *heads.names("DeepseekV3"),
    defaults={
        **DEFAULTS,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
)
def deepseek_v3(cfg: ModelConfig, m: Model) -> None:
    """DeepSeek-V3 decoder: V2 with another router."""
    write(cfg, m, rope_of_v3(cfg), mixture.deepseek3(cfg, "mlp.gate"))


def rope_of_v3(cfg: ModelConfig) -> Rope:
    """The rope of DeepSeek-V3."""
    return replace(cfg.rope_of(cfg.size("qk_rope_head_dim", 64)), interleaved=cfg.get("rope_interleave", True))


def write(cfg: ModelConfig, m: Model, rope: Rope, routing: Routing) -> None:
    """Writes the program."""
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for i, layer in enumerate(m.layers(f"{stem}layers", cfg.num_layers)):
        x = decoder_layer(cfg, layer, x, rope, None if i < cfg.get("first_k_dense_replace", 0) else routing)
    m.ignore(f"{stem}layers.{cfg.num_layers}.*")
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)


def decoder_layer(cfg: ModelConfig, layer: Block, x: Value, rope: Rope, routing: Routing | None) -> Value:
    """Latent attention, then a mixture; routing None: a dense MLP."""
    h = layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps)
    x = x + (attention(cfg, layer, h, rope) if cfg.get("use_mla", True) else plain_attention(cfg, layer, h, rope))
    h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
    return x + (usual.mlp(cfg, layer, h) if routing is None else experts(cfg, layer, h, routing))


def experts(cfg: ModelConfig, layer: Block, x: Value, routing: Routing) -> Value:
    """A mixture plus shared experts."""
    n_experts, n_chosen = cfg.size("n_routed_experts", 64), cfg.size("num_experts_per_tok", 6)
    width, n_shared = cfg.size("moe_intermediate_size", 1407), cfg.get("n_shared_experts", 0)
    y = mixture.experts(cfg, layer, x, "mlp", n_experts, n_chosen, width, **routing)
    return y + mixture.shared(cfg, layer, x, "mlp.shared_experts", width * n_shared) if n_shared else y


def plain_attention(cfg: ModelConfig, layer: Block, x: Value, rope: Rope) -> Value:
    """The attention of Llama, which DeepSeek-OCR has."""
    q, k, v = usual.qkv(cfg, layer, x, bias=cfg.get("attention_bias", False))
    q, k = layer.rope(q, k, rope)
    return usual.out(cfg, layer, layer.attention(q, k, v), bias=cfg.get("attention_bias", False))


def attention(cfg: ModelConfig, layer: Block, x: Value, rope: Rope) -> Value:
    """Latent attention with its projections."""
    n_heads, latent_dim, rope_dim = cfg.num_attention_heads, cfg.size("kv_lora_rank", 512), cfg.size("qk_rope_head_dim", 64)
    head_dim, value_dim = cfg.size("qk_nope_head_dim", 128) + rope_dim, cfg.size("v_head_dim", 128)
    bias, rank = cfg.get("attention_bias", False), cfg.get("q_lora_rank", 0)
    first, width = ("q_a_proj", rank) if rank else ("q_proj", n_heads * head_dim)
    if bias and not rank:  # only q_proj has no bias
        q = layer.linear(x, "self_attn.q_proj", width)
        latent = layer.linear(x, "self_attn.kv_a_proj_with_mqa", latent_dim + rope_dim, bias=True)
    else:
        names = [f"self_attn.{first}", "self_attn.kv_a_proj_with_mqa"]
        q, latent = layer.linear(x, names, [width, latent_dim + rope_dim], bias=bias)
    if rank:
        q = layer.linear(layer.rms_norm(q, "self_attn.q_a_layernorm", NORM_EPS), "self_attn.q_b_proj", n_heads * head_dim)
    latent, rope_key = layer.split(latent, [latent_dim, rope_dim])
    latent = layer.rms_norm(latent, "self_attn.kv_a_layernorm", NORM_EPS)
    name, scale = "self_attn.kv_b_proj", head_dim**-0.5 * mscale(cfg) ** 2
    out = layer.latent_attention(q, latent, rope_key, name, n_heads, value_dim, rope=rope, scale=scale)
    return usual.out(cfg, layer, out, bias=bias)


def mscale(cfg: ModelConfig) -> float:
    """The factor of a scaled rope on queries and keys."""
    parameters = Parameters(cfg.raw, cfg.file)
    all_dim = parameters.number("mscale_all_dim", 0.0) if parameters.kind != "default" else 0.0
    factor = parameters.number("factor") if all_dim else 1.0
    return 0.1 * all_dim * math.log(factor) + 1 if factor > 1 else 1.0
