"""Mistral 7B, Nemo and Small, and Ministral 3, text."""

from . import heads
from .blocks import Model
from .config import ModelConfig
from .registry import architecture
from .rope import Parameters

CHECKPOINTS = (
    "Mistral 7B v0.1 to v0.3, Mistral Nemo 12B, Mistral Small 22B and 24B (text); the language models of Ministral 3 3B, 8B "
    "and 14B, saved alone"
)
LIMITS = "Ministral 3: no GGUF"


@architecture(
    *heads.names("Mistral"),
    defaults={
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
)
@architecture(
    *heads.names("Ministral3"),
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
)
def mistral(cfg: ModelConfig, m: Model) -> None:
    """Mistral decoder: Llama without biases; all layers have the same attention window or none.

    Queries of Ministral 3 grow with the position: the factor has a step at each multiple of the original training length.
    """
    parameters = Parameters(cfg.raw, cfg.file)
    slope, every = parameters.number("llama_4_scaling_beta", 0.0), parameters.original_length(cfg.max_position_embeddings)
    q_width, kv_width = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    window = cfg.get("sliding_window", 0)
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        h = layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps)
        q, k, v = layer.linear(h, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], [q_width, kv_width, kv_width])
        q, k = layer.rope(q, k, cfg.rope)
        q = layer.scale_by_position(q, int(every), slope) if slope else q
        x = x + layer.linear(layer.attention(q, k, v, window=window), "self_attn.o_proj", cfg.hidden_size)
        h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
        x = x + layer.gated_mlp(h, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", cfg.intermediate_size, act=cfg.hidden_act)
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)
