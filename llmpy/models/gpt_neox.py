"""GPT-NeoX and Pythia."""

from . import heads
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "GPT-NeoX 20B, Pythia 14M to 12B, Dolly v2, RedPajama-INCITE"


@architecture(
    *heads.names("GPTNeoX"),
    defaults={
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.25,
        "use_parallel_residual": True,
        "attention_bias": True,
    },
    renames={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    ignore=["*.attention.bias", "*.attention.masked_bias"],
)
def gpt_neox(cfg: ModelConfig, m: Model) -> None:
    """GPT-NeoX decoder: two parallel layer norms, rope on a part of each head, q, k and v packed head by head."""
    width, eps = cfg.hidden_size, cfg.positive("layer_norm_eps", 1e-5)
    bias, is_parallel = cfg.get("attention_bias", True), cfg.get("use_parallel_residual", True)
    stem = m.stem("gpt_neox.", "embed_in")
    x = m.embed(f"{stem}embed_in")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        h = layer.layer_norm(x, "input_layernorm", eps)
        q, k, v = layer.linear(h, "attention.query_key_value", [width] * 3, bias=bias, groups=cfg.num_attention_heads)
        q, k = layer.rope(q, k, cfg.rope)
        y = x + layer.linear(layer.attention(q, k, v), "attention.dense", width, bias=bias)
        h = layer.layer_norm(x if is_parallel else y, "post_attention_layernorm", eps)
        x = y + layer.mlp(h, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", cfg.intermediate_size, act=cfg.hidden_act)
    x = m.layer_norm(x, f"{stem}final_layer_norm", eps)
    heads.head(cfg, m, x, stem, embedding="embed_in", name="embed_out")
