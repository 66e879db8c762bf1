"""GLM-4: the models of transformers' families Glm and Glm4."""

from dataclasses import replace

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "GLM-4-9B, GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1"
DEFAULTS = {
    "rms_norm_eps": 1.5625e-7,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}


@architecture(*heads.names("Glm"), defaults=DEFAULTS)
def glm(cfg: ModelConfig, m: Model) -> None:
    """GLM decoder: Llama with biases on q, k and v, gate and up in one matrix, and interleaved rope on half of each head."""
    write(cfg, m, "", "")


@architecture(*heads.names("Glm4"), defaults=DEFAULTS)
def glm4(cfg: ModelConfig, m: Model) -> None:
    """GLM-4-0414 decoder: GLM with norms also after attention and MLP."""
    write(cfg, m, "post_self_attn_layernorm", "post_mlp_layernorm")


def write(cfg: ModelConfig, m: Model, behind_attention: str, behind_mlp: str) -> None:
    """Writes the program; "" for a name means that there is no norm after that branch."""
    eps, rope = cfg.rms_norm_eps, replace(cfg.rope, interleaved=True)
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        h = layer.rms_norm(x, "input_layernorm", eps)
        q, k, v = usual.qkv(cfg, layer, h, bias=cfg.get("attention_bias", True))
        q, k = layer.rope(q, k, rope)
        h = usual.out(cfg, layer, layer.attention(q, k, v))
        x = x + (layer.rms_norm(h, behind_attention, eps) if behind_attention else h)
        h = usual.fused_mlp(cfg, layer, layer.rms_norm(x, "post_attention_layernorm", eps))
        x = x + (layer.rms_norm(h, behind_mlp, eps) if behind_mlp else h)
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", eps), stem)
