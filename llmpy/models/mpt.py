"""MosaicML's MPT."""

from collections.abc import Mapping

from . import alibi, heads
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "MPT 7B (base, chat, instruct, 8k, StoryWriter) and 30B"


@architecture(
    *heads.names("Mpt"),
    "MPTForCausalLM",
    defaults={"layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "tie_word_embeddings": True},
    renames={
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "max_seq_len": "max_position_embeddings",
    },
)
def mpt(cfg: ModelConfig, m: Model) -> None:
    """MPT decoder: ALiBi slopes instead of positions, layer norms without biases, a plain MLP, and clipped q, k and v."""
    given = cfg.raw.get("attn_config")
    attn = ModelConfig({**(given if isinstance(given, Mapping) else {}), "architectures": [cfg.architecture]}, cfg.file)
    attn.without("qk_ln", "prefix_lm", "attn_uses_sequence_id")
    attn.only("alibi", True)
    cfg.only("no_bias", True)
    width, eps, clip = cfg.hidden_size, cfg.positive("layer_norm_epsilon", 1e-5), attn.get("clip_qkv", 0.0)
    inner, scale = cfg.size("expansion_ratio", 4) * width, attn.get("softmax_scale", cfg.head_dim**-0.5)
    slopes = m.constant(alibi.slopes(cfg.num_attention_heads, attn.get("alibi_bias_max", 8.0)))
    stem = m.stem("transformer.", "wte")
    x = m.embed(f"{stem}wte")
    for layer in m.layers(f"{stem}blocks", cfg.num_layers):
        h = layer.linear(layer.layer_norm(x, "norm_1", eps, bias=False), "attn.Wqkv", 3 * width)
        q, k, v = layer.split(layer.clip(h, clip) if clip else h, [width] * 3)
        h = layer.attention(q, k, v, scale=scale, slopes=slopes)
        x = x + layer.linear(h, "attn.out_proj", width)
        h = layer.layer_norm(x, "norm_2", eps, bias=False)
        x = x + layer.mlp(h, "ffn.up_proj", "ffn.down_proj", inner, act="gelu", bias=False)
    heads.head(cfg, m, m.layer_norm(x, f"{stem}norm_f", eps, bias=False), stem, embedding="wte")
