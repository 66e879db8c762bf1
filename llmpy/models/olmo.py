"""OLMo 1."""

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "OLMo 1B, 7B and 7B-0724"
EPS = 1e-5  # the configuration has no field for it


@architecture(*heads.names("Olmo"), defaults={"hidden_act": "silu", "max_position_embeddings": 2048})
def olmo(cfg: ModelConfig, m: Model) -> None:
    """OLMo decoder: Llama with weightless layer norms, and q, k and v clipped to +-`clip_qkv` if that is set."""
    bias = cfg.get("attention_bias", False)
    limit = cfg.positive("clip_qkv", 1.0) if cfg.get("clip_qkv", 0.0) else 0.0
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        q, k, v = usual.qkv(cfg, layer, layer.layer_norm(x, None, EPS), bias=bias)
        if limit:
            q, k, v = layer.clip(q, limit), layer.clip(k, limit), layer.clip(v, limit)
        q, k = layer.rope(q, k, cfg.rope)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v), bias=bias)
        x = x + usual.mlp(cfg, layer, layer.layer_norm(x, None, EPS))
    heads.head(cfg, m, m.layer_norm(x, None, EPS), stem)
