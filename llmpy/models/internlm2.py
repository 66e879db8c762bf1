"""InternLM 2 and 2.5."""

from . import heads
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "InternLM2 and InternLM2.5 1.8B, 7B and 20B"
REFERENCE = "Llama of transformers, under InternLM 2's names"


@architecture(
    "InternLM2ForCausalLM",
    defaults={"rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 2048},
)
def internlm2(cfg: ModelConfig, m: Model) -> None:
    """InternLM 2 decoder: Llama with one tensor of q, k and v; each head of k and v follows the heads of q that read it."""
    kv_width, bias = cfg.num_key_value_heads * cfg.head_dim, cfg.get("bias", False)
    widths = [cfg.num_attention_heads * cfg.head_dim, kv_width, kv_width]
    x = m.embed("model.tok_embeddings")
    for layer in m.layers("model.layers", cfg.num_layers):
        h = layer.rms_norm(x, "attention_norm", cfg.rms_norm_eps)
        q, k, v = layer.linear(h, "attention.wqkv", widths, bias=bias, groups=cfg.num_key_value_heads)
        q, k = layer.rope(q, k, cfg.rope)
        x = x + layer.linear(layer.attention(q, k, v), "attention.wo", cfg.hidden_size, bias=bias)
        h = layer.rms_norm(x, "ffn_norm", cfg.rms_norm_eps)
        names = ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2")
        x = x + layer.gated_mlp(h, *names, cfg.intermediate_size, act=cfg.hidden_act)
    heads.head(cfg, m, m.rms_norm(x, "model.norm", cfg.rms_norm_eps), "model.", embedding="tok_embeddings", name="output")
