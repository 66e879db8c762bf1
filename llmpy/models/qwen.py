"""Qwen 1."""

from . import heads
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Qwen 1.8B, 7B, 14B and 72B (the first generation)"
REFERENCE = "Qwen2 of transformers, under Qwen's names"
LIMITS = "no longer than the length of its training: `use_logn_attn` and `use_dynamic_ntk` act beyond it"


@architecture(
    "QWenLMHeadModel",
    defaults={"layer_norm_epsilon": 1e-6, "max_position_embeddings": 2048},
    renames={"seq_length": "max_position_embeddings", "kv_channels": "head_dim", "rotary_emb_base": "rope_theta"},
)
def qwen(cfg: ModelConfig, m: Model) -> None:
    """Qwen decoder: Llama with q, k and v in one tensor with biases; intermediate_size is the sum of gate's and up's widths.

    Beyond its training length the original scales q by the position and changes the base of rope (`use_logn_attn`,
    `use_dynamic_ntk`). The training length is max_position_embeddings here, so neither ever applies.
    """
    cfg.only("no_bias", True)
    width, heads_width, eps = cfg.hidden_size, cfg.num_attention_heads * cfg.head_dim, cfg.positive("layer_norm_epsilon", 1e-6)
    stem = m.stem("transformer.", "wte")
    x = m.embed(f"{stem}wte")
    for layer in m.layers(f"{stem}h", cfg.num_layers):
        q, k, v = layer.linear(layer.rms_norm(x, "ln_1", eps), "attn.c_attn", [heads_width] * 3, bias=True)
        q, k = layer.rope(q, k, cfg.rope)
        x = x + layer.linear(layer.attention(q, k, v), "attn.c_proj", width)
        h = layer.rms_norm(x, "ln_2", eps)
        x = x + layer.gated_mlp(h, "mlp.w2", "mlp.w1", "mlp.c_proj", cfg.intermediate_size // 2, act="silu")
    heads.head(cfg, m, m.rms_norm(x, f"{stem}ln_f", eps), stem, embedding="wte")
