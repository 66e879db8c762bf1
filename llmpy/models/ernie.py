"""ERNIE 4.5, dense and with mixtures of experts (text)."""

from dataclasses import replace

from . import heads, mixture, usual
from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "ERNIE 4.5 0.3B, 21B-A3B and 300B-A47B"
LIMITS = "text alone; layers that only predict further tokens are left out"

DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}


@architecture(*heads.names("Ernie4_5"), defaults={**DEFAULTS, "num_key_value_heads": 2, "head_dim": 128})
def ernie4_5(cfg: ModelConfig, m: Model) -> None:
    """ERNIE 4.5 decoder: Llama with interleaved rope."""
    write(cfg, m, 0, 0, 1, head_bias=False)


@architecture(
    *heads.names("Ernie4_5_Moe"),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 1536,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    ignore=["*mtp*"],
)
def ernie4_5_moe(cfg: ModelConfig, m: Model) -> None:
    """ERNIE 4.5 decoder with mixtures: the choice of experts has a bias, and there are shared experts."""
    last = cfg.get("moe_layer_end_index", -1)
    end = last + 1 if last >= 0 else cfg.num_layers
    step = cfg.size("moe_layer_interval", 1)
    write(cfg, m, cfg.get("moe_layer_start_index", 1), end, step, head_bias=cfg.get("use_bias", False))


def write(cfg: ModelConfig, m: Model, first: int, end: int, step: int, *, head_bias: bool) -> None:
    """Writes the program; every `step`-th layer in first..end has a mixture."""
    bias, rope = cfg.get("use_bias", False), replace(cfg.rope, interleaved=True)
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for i, layer in enumerate(m.layers(f"{stem}layers", cfg.num_layers)):
        q, k, v = usual.qkv(cfg, layer, layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps), bias=bias)
        q, k = layer.rope(q, k, rope)
        x = x + usual.out(cfg, layer, layer.attention(q, k, v), bias=bias)
        h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
        is_mixture = first <= i < end and (i + 1) % step == 0
        x = x + (mix(cfg, layer, h, bias) if is_mixture else usual.mlp(cfg, layer, h, bias=bias))
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem, bias=head_bias)


def mix(cfg: ModelConfig, layer: Block, x: Value, bias: bool) -> Value:
    """The mixture of a layer; `bias` says whether the shared experts have biases."""
    n_experts, n_chosen = cfg.size("moe_num_experts", 64), cfg.size("moe_k", 6)
    width, n_shared = cfg.size("moe_intermediate_size", 1536), cfg.get("moe_num_shared_experts", 2)
    y = mixture.experts(
        cfg, layer, x, "mlp", n_experts, n_chosen, width,
        score="softmax", normalised=True, selection_bias="mlp.moe_statics.e_score_correction_bias",
        selection_shape=(1, n_experts),
    )  # fmt: skip
    return y + mixture.shared(cfg, layer, x, "mlp.shared_experts", n_shared * width, bias=bias) if n_shared else y
