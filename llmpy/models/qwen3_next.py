"""Qwen3-Next."""

from . import heads, mixture, usual
from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Qwen3-Next-80B-A3B"
LIMITS = "layers that predict further tokens only draft (`mtp`); GGUF files of the first layout (`ssm_in`) are refused"


@architecture(
    "Qwen3NextForCausalLM",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 32768,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    ignore=["mtp.*"],
)
def qwen3_next(cfg: ModelConfig, m: Model) -> None:
    """Qwen3-Next decoder: a gated delta net in most layers, gated attention in every fourth; norm weights stored minus 1."""
    eps, step = cfg.rms_norm_eps, cfg.size("full_attention_interval", 4)
    kinds, dense = cfg.raw.get("layer_types"), cfg.raw.get("mlp_only_layers") or []
    x = m.embed("model.embed_tokens")
    for i, layer in enumerate(m.layers("model.layers", cfg.num_layers)):
        is_full = kinds[i] == "full_attention" if isinstance(kinds, list) else (i + 1) % step == 0
        is_sparse = i not in dense and (i + 1) % cfg.size("decoder_sparse_step", 1) == 0  # type: ignore[operator]
        x = decoder_layer(cfg, layer, x, is_full=is_full, is_sparse=is_sparse)
    heads.head(cfg, m, m.rms_norm(x, "model.norm", eps, offset=1.0), "model.")


def decoder_layer(cfg: ModelConfig, layer: Block, x: Value, *, is_full: bool, is_sparse: bool) -> Value:
    """Attention or a delta net, then a mixture or a dense MLP."""
    h = layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps, offset=1.0)
    x = x + (attention(cfg, layer, h) if is_full else delta_net(cfg, layer, h))
    h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps, offset=1.0)
    return x + (experts(cfg, layer, h) if is_sparse else usual.mlp(cfg, layer, h))


def delta_net(cfg: ModelConfig, layer: Block, x: Value) -> Value:
    """A convolution of q, k and v, then the gated delta rule; the matrices are packed by key heads."""
    n_keys, n_values = cfg.size("linear_num_key_heads", 1), cfg.size("linear_num_value_heads", 1)
    size, taps = cfg.size("linear_value_head_dim", 1), cfg.size("linear_conv_kernel_dim", 1)
    keys, values = n_keys * cfg.size("linear_key_head_dim", 1), n_values * size
    q, k, v, z = layer.linear(x, "linear_attn.in_proj_qkvz", [keys, keys, values, values], groups=n_keys)
    b, a = layer.linear(x, "linear_attn.in_proj_ba", [n_values, n_values], groups=n_keys)
    u = layer.conv(layer.join(q, k, v), "linear_attn.conv1d", taps, act=cfg.hidden_act, bias=False)
    q, k, v = layer.split(u, [keys, keys, values])
    o = layer.delta(q, k, v, a, b, "linear_attn", key_heads=n_keys)
    o = layer.rms_norm(o, "linear_attn.norm", cfg.rms_norm_eps, per_head=size)
    return layer.linear(layer.gated(z, o, cfg.hidden_act), "linear_attn.out_proj", cfg.hidden_size)


def attention(cfg: ModelConfig, layer: Block, x: Value) -> Value:
    """Attention with a gate on its output; the rows of q and of the gate are packed by heads."""
    n, eps, bias = cfg.num_attention_heads, cfg.rms_norm_eps, cfg.get("attention_bias", False)
    kv = cfg.num_key_value_heads * cfg.head_dim
    q, gate = layer.linear(x, "self_attn.q_proj", [n * cfg.head_dim] * 2, groups=n, bias=bias)
    k, v = layer.linear(x, ["self_attn.k_proj", "self_attn.v_proj"], [kv, kv], bias=bias)
    q = layer.rms_norm(q, "self_attn.q_norm", eps, per_head=True, offset=1.0)
    k = layer.rms_norm(k, "self_attn.k_norm", eps, per_head=True, offset=1.0)
    q, k = layer.rope(q, k, cfg.rope)
    return usual.out(cfg, layer, layer.gated(gate, layer.attention(q, k, v), "sigmoid"), bias=bias)


def experts(cfg: ModelConfig, layer: Block, x: Value) -> Value:
    """A mixture plus a gated shared expert."""
    width = cfg.size("shared_expert_intermediate_size", 512)
    y = mixture.experts(
        cfg, layer, x, "mlp", cfg.size("num_experts", 512), cfg.size("num_experts_per_tok", 10),
        cfg.size("moe_intermediate_size", 512), score="softmax", normalised=cfg.get("norm_topk_prob", True),
    )  # fmt: skip
    return y + mixture.shared(cfg, layer, x, "mlp.shared_expert", width, gate="mlp.shared_expert_gate")
