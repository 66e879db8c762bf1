"""PLaMo 2 and 2.1."""

from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture
from .rope import Rope

CHECKPOINTS = "PLaMo 2 1B and 8B, PLaMo 2 Translate, PLaMo 2.1 2B and 8B"
REFERENCE = "our own NumPy reference"
LIMITS = "text alone; GGUF files do not say their window, so every key is seen there"


@architecture(
    "Plamo2ForCausalLM",
    "PLaMo2ForCausalLM",
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_step": 2,
        "attention_window_size": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 10485760,
    },
    renames={"hidden_size_per_head": "head_dim"},
)
def plamo2(cfg: ModelConfig, m: Model) -> None:
    """PLaMo 2: a layer has Mamba-2's recurrence or attention, and norms before and after each branch."""
    cfg.only("linear_type", "normal")
    cfg.without("eval_attention_n_bit", "eval_mlp_n_bit")
    eps, inner = cfg.rms_norm_eps, cfg.intermediate_size
    ropes, full = cfg.layer_ropes(cfg.get("rope_local_theta", 10000.0)), cfg.raw.get("full_attention_idx") or []
    x = m.embed("model.embed_tokens")
    for i, layer in enumerate(m.layers("model.layers.layers", cfg.num_layers)):
        h = layer.rms_norm(x, "pre_mixer_norm", eps, offset=1.0)
        if is_mamba(cfg, i):
            h = mamba(cfg, layer, h)
        elif i in full:  # type: ignore[operator]
            h = attention(cfg, layer, h, ropes["full_attention"], 0)
        else:  # a row sees one key more than attention_window_size
            h = attention(cfg, layer, h, ropes["sliding_attention"], 1 + cfg.size("attention_window_size", 1))
        x = x + layer.rms_norm(h, "post_mixer_norm", eps, offset=1 / 5)
        h = layer.rms_norm(x, "pre_mlp_norm", eps, offset=1.0)
        gate, up = layer.linear(h, "mlp.gate_up_proj", [inner, inner])
        h = layer.linear(layer.gated(gate, up, "silu"), "mlp.down_proj", cfg.hidden_size)
        x = x + layer.rms_norm(h, "post_mlp_norm", eps, offset=5**-1.5)
    m.logits(m.rms_norm(x, "model.norm", eps, offset=1.0), "lm_head", tied_to="model.embed_tokens", padded=16)


def is_mamba(cfg: ModelConfig, i: int) -> bool:
    """Whether layer i has a recurrence: one of every mamba_step layers has attention instead."""
    step = cfg.size("mamba_step", 2)
    if not cfg.get("mamba_enabled", True):
        return False
    return i != cfg.num_layers - 1 if cfg.num_layers <= step // 2 else i % step != step // 2


def mamba(cfg: ModelConfig, layer: Block, x: Value) -> Value:
    """Mamba-2's mixer: B, C and dt are computed from the convolution's output, each with a norm. in_proj is packed by heads."""
    n_heads, state, eps = cfg.size("mamba_num_heads", 1), cfg.size("mamba_d_state", 1), cfg.rms_norm_eps
    width, rank = n_heads * cfg.head_dim, max(64, cfg.hidden_size // 16)
    gate, u = layer.linear(x, "mixer.in_proj", [width, width], groups=n_heads)
    u = layer.conv(u, "mixer.conv1d", cfg.size("mamba_d_conv", 1), act="silu", bias=False)
    b, c, dt = layer.linear(u, "mixer.bcdt_proj", [state, state, rank])
    b, c = layer.rms_norm(b, "mixer.B_norm_weight", eps), layer.rms_norm(c, "mixer.C_norm_weight", eps)
    dt = layer.linear(layer.rms_norm(dt, "mixer.dt_norm_weight", eps), "mixer.dt_proj", n_heads)
    y = layer.gated(gate, layer.ssm(u, dt, b, c, "mixer"), "silu")
    return layer.linear(y, "mixer.out_proj", cfg.hidden_size)


def attention(cfg: ModelConfig, layer: Block, x: Value, rope: Rope, window: int) -> Value:
    """Attention with norms on the heads of q and k; each head has its own norm weights."""
    q_width, kv_width = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    q, k, v = layer.linear(x, "mixer.qkv_proj", [q_width, kv_width, kv_width])
    q = layer.rms_norm(q, "mixer.q_weight", 1e-6, per_head=True, own_weights=True)
    k = layer.rms_norm(k, "mixer.k_weight", 1e-6, per_head=True, own_weights=True)
    q, k = layer.rope(q, k, rope)
    return layer.linear(layer.attention(q, k, v, window=window), "mixer.o_proj", cfg.hidden_size)
