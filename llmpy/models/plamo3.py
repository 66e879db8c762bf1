"""PLaMo 3."""

from math import sqrt

from ..errors import CheckpointError
from . import heads
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "PLaMo 3 NICT 2B, 8B and 31B"
REFERENCE = "our plain NumPy reference; Gemma 3 of transformers with the same weights"
AFTER_MIXER, AFTER_MLP = 1 / 5, 1 / 5**1.5  # offsets of norms after a branch: weights are stored minus these


def windows(cfg: ModelConfig) -> list[int]:
    """The window of every layer, 0 for full attention. The field is a list, or one number for the sliding layers."""
    given = cfg.raw.get("interleaved_sliding_window") or cfg.raw.get("sliding_window")
    if isinstance(given, list):
        if len(given) != cfg.num_layers or not all(w is None or (isinstance(w, int) and w >= 0) for w in given):
            problem = f"sliding_window: wanted a window or null for each of {cfg.num_layers} layers, have {given!r}"
            raise CheckpointError(f"{cfg.file}: {problem}", file=cfg.file)
        return [w or 0 for w in given]
    width = cfg.size("sliding_window", cfg.size("window_size", 2048))
    return [width if kind == "sliding_attention" else 0 for kind in cfg.layer_kinds(8)]


def stretch(cfg: ModelConfig) -> None:
    """Converts `rope_scaling_factor` to transformers' `rope_scaling`: YaRN, on the layers with full attention."""
    factor = cfg.positive("rope_scaling_factor", 1.0)
    if factor != 1 and not (cfg.raw.get("rope_parameters") or cfg.raw.get("rope_scaling")):
        original = cfg.size("initial_context_length", 4096)
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        cfg.raw["rope_scaling"] = {**yarn, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}


@architecture(
    "Plamo3ForCausalLM",
    "Plamo3Model",
    defaults={
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
)
def plamo3(cfg: ModelConfig, m: Model) -> None:
    """PLaMo 3 decoder: norms around each branch and on the heads of q and k. Seven of eight layers have a window and another
    rope base. All norm weights are stored minus their initial values."""
    cfg.counts_rope_scaling = True
    stretch(cfg)
    ropes, eps = cfg.layer_ropes(cfg.positive("rope_local_theta", 10000.0)), cfg.rms_norm_eps
    q_width, kv_width = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    width = cfg.intermediate_size
    scale = sqrt(cfg.hidden_size) if cfg.get("scale_embedding", False) else 1.0
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens", scale=scale)
    for layer, window in zip(m.layers(f"{stem}layers.layers", cfg.num_layers), windows(cfg), strict=True):
        h = layer.rms_norm(x, "pre_mixer_norm", eps, offset=1.0)
        h = layer.linear(h, "mixer.qkv_proj", q_width + 2 * kv_width)
        q, k, v = layer.split(h, [q_width, kv_width, kv_width])
        q = layer.rms_norm(q, "mixer.q_norm", eps, per_head=True, offset=1.0)
        k = layer.rms_norm(k, "mixer.k_norm", eps, per_head=True, offset=1.0)
        q, k = layer.rope(q, k, ropes["sliding_attention" if window else "full_attention"])
        h = layer.linear(layer.attention(q, k, v, window=window), "mixer.o_proj", cfg.hidden_size)
        x = x + layer.rms_norm(h, "post_mixer_norm", eps, offset=AFTER_MIXER)
        h = layer.linear(layer.rms_norm(x, "pre_mlp_norm", eps, offset=1.0), "mlp.gate_up_proj", 2 * width)
        gate, up = layer.split(h, [width, width])
        h = layer.linear(layer.gated(gate, up, cfg.hidden_act), "mlp.down_proj", cfg.hidden_size)
        x = x + layer.rms_norm(h, "post_mlp_norm", eps, offset=AFTER_MLP)
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", eps, offset=1.0), stem, padded=16)
