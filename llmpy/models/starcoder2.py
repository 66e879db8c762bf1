"""StarCoder 2."""

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "StarCoder2 3B, 7B and 15B"


@architecture(
    *heads.names("Starcoder2"),
    defaults={
        "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
)
def starcoder2(cfg: ModelConfig, m: Model) -> None:
    """StarCoder 2 decoder: Llama's attention with layer norms, a plain MLP and biases."""
    eps, bias, window = cfg.positive("norm_epsilon", 1e-5), cfg.get("use_bias", True), cfg.get("sliding_window", 0)
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        h = layer.layer_norm(x, "input_layernorm", eps)
        q, k, v = usual.qkv(cfg, layer, h, bias=bias)
        q, k = layer.rope(q, k, cfg.rope)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v, window=window), bias=bias)
        h = layer.layer_norm(x, "post_attention_layernorm", eps)
        x = x + layer.mlp(h, "mlp.c_fc", "mlp.c_proj", cfg.intermediate_size, act=cfg.hidden_act, bias=bias)
    heads.head(cfg, m, m.layer_norm(x, f"{stem}norm", eps), stem)
