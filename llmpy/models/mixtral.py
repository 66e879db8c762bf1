"""Mixtral."""

from . import heads, mixture, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Mixtral 8x7B and 8x22B"


@architecture(
    *heads.names("Mixtral"),
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)
def mixtral(cfg: ModelConfig, m: Model) -> None:
    """Mixtral decoder: Llama with a mixture of experts instead of the MLP; the chosen experts' weights sum to 1."""
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        q, k, v = usual.qkv(cfg, layer, layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps))
        q, k = layer.rope(q, k, cfg.rope)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v, window=cfg.get("sliding_window", 0)))
        h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
        x = x + mixture.experts(
            cfg, layer, h, "block_sparse_moe", cfg.size("num_local_experts", 8), cfg.size("num_experts_per_tok", 2),
            cfg.intermediate_size, names=("w1", "w3", "w2"), score="softmax", normalised=True,
        )  # fmt: skip
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)
