"""GLM-4.5 to 4.7: transformers' family Glm4Moe."""

from . import heads, mixture, usual
from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7"
LIMITS = "layers that predict further tokens only draft (`mtp`)"


@architecture(
    *heads.names("Glm4Moe"),
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
    },
)
def glm4_moe(cfg: ModelConfig, m: Model) -> None:
    """GLM-4.5 decoder: mixtures with DeepSeek-V3's routing after the first layers, rope on half of each head."""
    stem = m.stem("model.", "embed_tokens")
    m.ignore(f"{stem}layers.{cfg.num_layers}.*")
    x = m.embed(f"{stem}embed_tokens")
    for i, layer in enumerate(m.layers(f"{stem}layers", cfg.num_layers)):
        x = decoder_layer(cfg, layer, x, is_dense=i < cfg.get("first_k_dense_replace", 1))
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)


def decoder_layer(cfg: ModelConfig, layer: Block, x: Value, *, is_dense: bool) -> Value:
    """Attention, then a dense MLP or a mixture with a shared expert."""
    bias, width = cfg.get("attention_bias", False), cfg.size("moe_intermediate_size", 1408)
    q, k, v = usual.qkv(cfg, layer, layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps), bias=bias)
    if cfg.get("use_qk_norm", False):
        q = layer.rms_norm(q, "self_attn.q_norm", cfg.rms_norm_eps, per_head=True)
        k = layer.rms_norm(k, "self_attn.k_norm", cfg.rms_norm_eps, per_head=True)
    q, k = layer.rope(q, k, cfg.rope)
    x = x + usual.out(cfg, layer, layer.attention(q, k, v))
    h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
    if is_dense:
        return x + usual.mlp(cfg, layer, h)
    y = mixture.experts(
        cfg, layer, h, "mlp", cfg.size("n_routed_experts", 128), cfg.size("num_experts_per_tok", 8), width,
        **mixture.deepseek3(cfg, "mlp.gate"),
    )  # fmt: skip
    return x + (y + mixture.shared(cfg, layer, h, "mlp.shared_experts", width * cfg.size("n_shared_experts", 1)))
