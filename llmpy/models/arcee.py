"""Arcee (AFM)."""

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "AFM-4.5B"


@architecture(*heads.names("Arcee"), defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2", "max_position_embeddings": 4096})
def arcee(cfg: ModelConfig, m: Model) -> None:
    """Arcee decoder: Llama with a plain MLP, down(relu(up(x))^2)."""
    attention_bias, mlp_bias = cfg.get("attention_bias", False), cfg.get("mlp_bias", False)
    cfg.only("hidden_act", "relu2")
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        h = layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps)
        q, k, v = usual.qkv(cfg, layer, h, bias=attention_bias)
        q, k = layer.rope(q, k, cfg.rope)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v), bias=attention_bias)
        h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
        up = layer.linear(h, "mlp.up_proj", cfg.intermediate_size, bias=mlp_bias)
        # relu(up) * up is relu(up)^2.
        x = x + layer.linear(layer.gated(up, up, "relu"), "mlp.down_proj", cfg.hidden_size, bias=mlp_bias)
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)
