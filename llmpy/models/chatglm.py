"""ChatGLM 2 and 3, GLM-4 9B in its own format."""

import numpy as np

from .blocks import Model
from .config import ModelConfig
from .registry import architecture
from .rope import Rope

CHECKPOINTS = "ChatGLM2 6B, ChatGLM3 6B, GLM-4-9B (in the format with its own code)"
REFERENCE = "Glm of transformers, under ChatGLM's names"


@architecture(
    *("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    defaults={"max_position_embeddings": 8192},
    renames={
        "padded_vocab_size": "vocab_size",
        "num_layers": "num_hidden_layers",
        "ffn_hidden_size": "intermediate_size",
        "kv_channels": "head_dim",
        "seq_length": "max_position_embeddings",
        "multi_query_group_num": "num_key_value_heads",
        "layernorm_epsilon": "rms_norm_eps",
    },
    ignore=["*.rotary_pos_emb.inv_freq"],
)
def chatglm(cfg: ModelConfig, m: Model) -> None:
    """ChatGLM decoder: Llama with few heads of k and v, interleaved rope on half of each head, and fused projections."""
    cfg.without("apply_residual_connection_post_layernorm", "add_bias_linear", "pre_seq_len")
    for name in ("rmsnorm", "multi_query_attention", "post_layer_norm"):
        cfg.only(name, True)
    q_width, kv_width = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    n, theta = cfg.head_dim // 2, 10000.0 * cfg.positive("rope_ratio", 1.0)
    rope = Rope((theta ** (-np.arange(0, n, 2, dtype=np.float32) / n)).astype(np.float32), interleaved=True)
    x = m.embed("transformer.embedding.word_embeddings")
    for layer in m.layers("transformer.encoder.layers", cfg.num_layers):
        h = layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps)
        bias, widths = cfg.get("add_qkv_bias", False), [q_width, kv_width, kv_width]
        q, k, v = layer.linear(h, "self_attention.query_key_value", widths, bias=bias)
        q, k = layer.rope(q, k, rope)
        x = x + layer.linear(layer.attention(q, k, v), "self_attention.dense", cfg.hidden_size)
        h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
        gate, up = layer.linear(h, "mlp.dense_h_to_4h", [cfg.intermediate_size] * 2)
        x = x + layer.linear(layer.gated(gate, up, "silu"), "mlp.dense_4h_to_h", cfg.hidden_size)
    x = m.rms_norm(x, "transformer.encoder.final_layernorm", cfg.rms_norm_eps)
    m.logits(x, "transformer.output_layer", tied_to="transformer.embedding.word_embeddings")
