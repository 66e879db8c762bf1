"""Llama 1 to 3, and models with the same architecture: SmolLM2, CodeLlama, Vicuna, TinyLlama."""

from . import heads
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = (
    "Llama 2, 3, 3.1, 3.2 (text) and 3.3; SmolLM2, TinyLlama, Vicuna, CodeLlama, Yi, DeepSeek LLM and R1-Distill-Llama"
)


@architecture(
    *heads.names("Llama"),
    "LLaMAForCausalLM",
    defaults={"rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 2048},
)
def llama(cfg: ModelConfig, m: Model) -> None:
    """Llama decoder: pre-norm attention with rope, gated MLP; biases if the configuration sets them."""
    q_width, kv_width = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    attention_bias, mlp_bias = cfg.get("attention_bias", False), cfg.get("mlp_bias", False)
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        h = layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps)
        q, k, v = layer.linear(
            h,
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            [q_width, kv_width, kv_width],
            bias=attention_bias,
        )
        q, k = layer.rope(q, k, cfg.rope)
        x = x + layer.linear(layer.attention(q, k, v), "self_attn.o_proj", cfg.hidden_size, bias=attention_bias)
        h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
        x = x + layer.gated_mlp(
            h, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", cfg.intermediate_size, act=cfg.hidden_act, bias=mlp_bias
        )
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)
