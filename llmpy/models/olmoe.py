"""OLMoE."""

from . import heads, mixture, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "OLMoE 1B-7B (0924, 0125)"


@architecture(
    *heads.names("Olmoe"),
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
)
def olmoe(cfg: ModelConfig, m: Model) -> None:
    """OLMoE decoder: a mixture of experts in every layer, norms over all heads of q and of k at once."""
    bias, limit = cfg.get("attention_bias", False), cfg.get("clip_qkv", 0.0)
    n_experts, n_chosen = cfg.size("num_experts", 64), cfg.size("num_experts_per_tok", 8)
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        q, k, v = usual.qkv(cfg, layer, layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps), bias=bias)
        q = layer.rms_norm(q, "self_attn.q_norm", cfg.rms_norm_eps)
        k = layer.rms_norm(k, "self_attn.k_norm", cfg.rms_norm_eps)
        if limit:
            q, k, v = (layer.clip(part, limit) for part in (q, k, v))
        q, k = layer.rope(q, k, cfg.rope)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v), bias=bias)
        x = x + mixture.experts(
            cfg, layer, layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps), "mlp", n_experts, n_chosen,
            cfg.intermediate_size, score="softmax", normalised=cfg.get("norm_topk_prob", False),
        )  # fmt: skip
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)
