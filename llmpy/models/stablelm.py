"""StableLM 2 and StableLM 3B."""

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "StableLM 3B, StableLM 2 1.6B and 12B, Stable Code 3B"


@architecture(
    *heads.names("StableLm"),
    defaults={
        "layer_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.25,
    },
)
def stablelm(cfg: ModelConfig, m: Model) -> None:
    """StableLM decoder: Llama with layer norms and rope on a quarter of each head; attention and MLP may share their input."""
    eps, bias = cfg.positive("layer_norm_eps", 1e-5), cfg.get("use_qkv_bias", False)
    norm = "self_attn.{}_layernorm.norms.#" if cfg.get("qk_layernorm", False) else ""  # a module for each head
    is_parallel = cfg.get("use_parallel_residual", False)
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        h = layer.layer_norm(x, "input_layernorm", eps)
        q, k, v = usual.qkv(cfg, layer, h, bias=bias)
        if norm:
            q = layer.layer_norm(q, norm.format("q"), eps, bias=False, per_head=True, own_weights=True)
            k = layer.layer_norm(k, norm.format("k"), eps, bias=False, per_head=True, own_weights=True)
        q, k = layer.rope(q, k, cfg.rope)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v))
        h = h if is_parallel else layer.layer_norm(x, "post_attention_layernorm", eps)
        x = x + usual.mlp(cfg, layer, h)
    heads.head(cfg, m, m.layer_norm(x, f"{stem}norm", eps), stem)
