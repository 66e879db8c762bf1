"""SmolLM3."""

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "SmolLM3 3B"


@architecture(
    *heads.names("SmolLM3"),
    defaults={
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    },
)
def smollm3(cfg: ModelConfig, m: Model) -> None:
    """SmolLM3 decoder: Llama, with no rope in every fourth layer."""
    attention_bias, mlp_bias = cfg.get("attention_bias", False), cfg.get("mlp_bias", False)
    turned = cfg.layer_flags("no_rope_layers", lambda i: (i + 1) % cfg.size("no_rope_layer_interval", 4) != 0)
    kinds, is_given = cfg.layer_kinds(1), cfg.raw.get("layer_types") is not None
    window = cfg.get("sliding_window", 0) if cfg.get("use_sliding_window", False) else 0
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer, rope, kind in zip(m.layers(f"{stem}layers", cfg.num_layers), turned, kinds, strict=True):
        slides = kind == "sliding_attention" if is_given else not rope
        h = layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps)
        q, k, v = usual.qkv(cfg, layer, h, bias=attention_bias)
        q, k = layer.rope(q, k, cfg.rope) if rope else (q, k)
        h = layer.attention(q, k, v, window=window if slides else 0)
        x = x + usual.out(cfg, layer, h, bias=attention_bias)
        h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
        x = x + usual.mlp(cfg, layer, h, bias=mlp_bias)
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)
