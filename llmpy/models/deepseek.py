"""DeepSeek-V2, V3 and R1: latent attention, and mixtures of experts behind some dense layers."""

import math
from dataclasses import replace

from ..errors import UnsupportedError
from . import heads, usual
from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture
from .rope import Parameters, Rope

DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 0,
    "max_position_embeddings": 2048,
}
NORM_EPS = 1e-6  # of the norms inside attention, whatever rms_norm_eps says


@architecture(*heads.names("DeepseekV2"), defaults=DEFAULTS)
def deepseek_v2(cfg: ModelConfig, m: Model) -> None:
    """DeepSeek-V2 decoder."""
    write(cfg, m, replace(cfg.rope_of(cfg.size("qk_rope_head_dim", 64)), interleaved=True))


@architecture(*heads.names("DeepseekV3"), defaults={**DEFAULTS, "first_k_dense_replace": 3, "max_position_embeddings": 4096})
def deepseek_v3(cfg: ModelConfig, m: Model) -> None:
    """DeepSeek-V3 decoder: V2 with another router; what predicts a token beyond the next one is not used."""
    interleaved = cfg.get("rope_interleave", True)
    write(cfg, m, replace(cfg.rope_of(cfg.size("qk_rope_head_dim", 64)), interleaved=interleaved))


def write(cfg: ModelConfig, m: Model, rope: Rope) -> None:
    """The program."""
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for i, layer in enumerate(m.layers(f"{stem}layers", cfg.num_layers)):
        x = x + attention(cfg, layer, layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps), rope)
        h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
        if i >= cfg.get("first_k_dense_replace", 0):
            raise UnsupportedError(f"{cfg.file}: mixtures of experts are not supported by {cfg.architecture}")
        x = x + usual.mlp(cfg, layer, h)
    m.ignore(f"{stem}layers.{cfg.num_layers}.*")
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)


def attention(cfg: ModelConfig, layer: Block, x: Value, rope: Rope) -> Value:
    """Latent attention with its projections."""
    n_heads, latent_dim, rope_dim = cfg.num_attention_heads, cfg.size("kv_lora_rank", 512), cfg.size("qk_rope_head_dim", 64)
    head_dim, value_dim = cfg.size("qk_nope_head_dim", 128) + rope_dim, cfg.size("v_head_dim", 128)
    bias, rank = cfg.get("attention_bias", False), cfg.get("q_lora_rank", 0)
    first, width = ("q_a_proj", rank) if rank else ("q_proj", n_heads * head_dim)
    if bias and not rank:  # q_proj alone has none
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
    """What a scaled rope multiplies queries and keys by."""
    parameters = Parameters(cfg.raw, cfg.file)
    all_dim = parameters.number("mscale_all_dim", 0.0) if parameters.kind != "default" else 0.0
    factor = parameters.number("factor") if all_dim else 1.0
    return 0.1 * all_dim * math.log(factor) + 1 if factor > 1 else 1.0
