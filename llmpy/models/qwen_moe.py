"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B) and Qwen3-MoE (Qwen3-30B-A3B, 235B-A22B)."""

from collections.abc import Callable, Iterator

from . import heads, mixture, usual
from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B, Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-30B-A3B and 480B-A35B"

DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}


@architecture(
    *heads.names("Qwen2Moe"),
    defaults=DEFAULTS
    | {"num_key_value_heads": 16, "num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    | {"max_window_layers": 28},
)
def qwen2_moe(cfg: ModelConfig, m: Model) -> None:
    """Qwen2-MoE decoder: Qwen2 with mixtures of experts, each with a shared expert weighted by a sigmoid."""
    width = cfg.size("shared_expert_intermediate_size", 5632)

    def attend(layer: Block, h: Value, window: int) -> Value:
        q, k, v = usual.qkv(cfg, layer, h, bias=cfg.get("qkv_bias", True))
        q, k = layer.rope(q, k, cfg.rope)
        return usual.out(cfg, layer, layer.attention(q, k, v, window=window))

    def shared(layer: Block, h: Value) -> Value:
        return mixture.shared(cfg, layer, h, "mlp.shared_expert", width, gate="mlp.shared_expert_gate")

    write(cfg, m, windows(cfg), attend, shared)


@architecture(
    *heads.names("Qwen3Moe"),
    defaults=DEFAULTS
    | {"num_key_value_heads": 4, "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
)
def qwen3_moe(cfg: ModelConfig, m: Model) -> None:
    """Qwen3-MoE decoder: Qwen3 with mixtures of experts."""
    bias = cfg.get("attention_bias", False)

    def attend(layer: Block, h: Value, window: int) -> Value:
        q, k, v = usual.qkv(cfg, layer, h, bias=bias)
        q = layer.rms_norm(q, "self_attn.q_norm", cfg.rms_norm_eps, per_head=True)
        k = layer.rms_norm(k, "self_attn.k_norm", cfg.rms_norm_eps, per_head=True)
        q, k = layer.rope(q, k, cfg.rope)
        return usual.out(cfg, layer, layer.attention(q, k, v, window=window), bias=bias)

    window = cfg.get("sliding_window", 0) if cfg.get("use_sliding_window", False) else 0
    write(cfg, m, iter([window] * cfg.num_layers), attend, None)


def windows(cfg: ModelConfig) -> Iterator[int]:
    """Windows of Qwen2-MoE: without `layer_types`, every second of the first max_window_layers layers slides."""
    if cfg.raw.get("layer_types") is not None:
        return cfg.layer_windows()
    window = cfg.get("sliding_window", 0) if cfg.get("use_sliding_window", False) else 0
    first = cfg.get("max_window_layers", 28)
    return (window if i % 2 == 0 and i < first else 0 for i in range(cfg.num_layers))


def write(
    cfg: ModelConfig,
    m: Model,
    layer_windows: Iterator[int],
    attend: Callable[[Block, Value, int], Value],
    shared: Callable[[Block, Value], Value] | None,
) -> None:
    """Writes the program; `attend` writes a layer's attention, `shared` the shared expert of a mixture (None: none)."""
    n_experts = cfg.size("num_experts", cfg.size("num_local_experts", 1))  # the name depends on the version of transformers
    n_chosen = cfg.size("num_experts_per_tok", 1)
    width, normalised = cfg.size("moe_intermediate_size", 1), cfg.get("norm_topk_prob", False)
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    rows = zip(m.layers(f"{stem}layers", cfg.num_layers), layer_windows, mixture.qwen_layers(cfg), strict=True)
    for layer, window, is_mixture in rows:
        x = x + attend(layer, layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps), window)
        h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
        if is_mixture:
            y = mixture.experts(cfg, layer, h, "mlp", n_experts, n_chosen, width, score="softmax", normalised=normalised)
            x = x + (y + shared(layer, h) if shared else y)
        else:
            x = x + usual.mlp(cfg, layer, h)
        x = m.inject(x)
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)
