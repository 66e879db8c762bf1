"""Falcon 7B, 40B, 180B, Falcon 2 11B and Falcon-RW."""

import numpy as np

from ..weights import bfloat16
from . import alibi, heads
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Falcon 7B, 40B and 180B, Falcon 2 11B, Falcon-RW 1B and 7B"


@architecture(
    *heads.names("Falcon"),
    *("RWForCausalLM", "RWModel"),
    defaults={
        "layer_norm_epsilon": 1e-5,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "multi_query": True,
        "parallel_attn": True,
        "tie_word_embeddings": True,
    },
    renames={
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_head_kv": "num_kv_heads",
        "ffn_hidden_size": "intermediate_size",
        "activation": "hidden_act",
    },
)
def falcon(cfg: ModelConfig, m: Model) -> None:
    """Falcon decoder: attention and MLP in parallel (with one norm or two) or in sequence; rope or ALiBi slopes."""
    width, n_heads, bias = cfg.hidden_size, cfg.num_attention_heads, cfg.get("bias", False)
    eps = cfg.positive("layer_norm_epsilon", 1e-5)
    is_new, is_parallel = cfg.get("new_decoder_architecture", False), cfg.get("parallel_attn", True)
    has_two = is_new and cfg.get("num_ln_in_parallel_attn", 2) == 2
    n_kv_heads = cfg.size("num_kv_heads", n_heads) if is_new else 1 if cfg.get("multi_query", True) else n_heads
    kv_width, inner = n_kv_heads * cfg.head_dim, cfg.size("intermediate_size", 4 * width)
    slopes = None
    if cfg.get("alibi", False):  # the scale applies to the sum of score and ALiBi term
        slopes = m.constant(bfloat16.rounded(alibi.slopes(n_heads)) * np.float32(cfg.head_dim**-0.5))
    stem = m.stem("transformer.", "word_embeddings")
    x = m.embed(f"{stem}word_embeddings")
    for layer in m.layers(f"{stem}h", cfg.num_layers):
        h = layer.layer_norm(x, "ln_attn" if has_two else "input_layernorm", eps)
        q, k, v = layer.linear(h, "self_attention.query_key_value", [width, kv_width, kv_width], bias=bias, groups=n_kv_heads)
        q, k = layer.rope(q, k, cfg.rope) if slopes is None else (q, k)
        y = x + layer.linear(layer.attention(q, k, v, slopes=slopes), "self_attention.dense", width, bias=bias)
        if has_two:
            h = layer.layer_norm(x, "ln_mlp", eps)
        elif not (is_new or is_parallel):
            h = layer.layer_norm(y, "post_attention_layernorm", eps)
        x = y + layer.mlp(h, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", inner, act=cfg.hidden_act, bias=bias)
    heads.head(cfg, m, m.layer_norm(x, f"{stem}ln_f", eps), stem, embedding="word_embeddings")
