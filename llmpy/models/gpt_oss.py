"""gpt-oss: attention sinks, alternating windows and clamped mixtures of experts."""

from . import heads, usual
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "gpt-oss-20b, gpt-oss-120b"


@architecture(
    *heads.names("GptOss"),
    defaults={
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
)
def gpt_oss(cfg: ModelConfig, m: Model) -> None:
    """gpt-oss decoder: a sink in every softmax, a window in every other layer, a mixture in every layer."""
    cfg.only("swiglu_alpha", 1.702)
    bias, window = cfg.get("attention_bias", True), cfg.get("sliding_window", 0)
    n_experts, n_chosen = cfg.size("num_local_experts", 128), cfg.size("num_experts_per_tok", 4)
    stem = m.stem("model.", "embed_tokens")
    x = m.embed(f"{stem}embed_tokens")
    for layer, kind in zip(m.layers(f"{stem}layers", cfg.num_layers), cfg.layer_kinds(2), strict=True):
        q, k, v = usual.qkv(cfg, layer, layer.rms_norm(x, "input_layernorm", cfg.rms_norm_eps), bias=bias)
        q, k = layer.rope(q, k, cfg.rope)
        seen = window if kind == "sliding_attention" else 0
        x = x + usual.out(cfg, layer, layer.attention(q, k, v, window=seen, sinks="self_attn.sinks"), bias=bias)
        h = layer.rms_norm(x, "post_attention_layernorm", cfg.rms_norm_eps)
        routes = layer.route(h, "mlp.router", n_experts, n_chosen, score="chosen_softmax", bias=True)
        is_packed = m.n_dims(f"{layer.prefix}mlp.experts.gate_up_proj_blocks") == 4  # not transposed
        x = x + layer.experts(
            h, routes, ["mlp.experts.gate_up_proj"], "mlp.experts.down_proj", cfg.intermediate_size, form="clamped",
            limit=cfg.positive("swiglu_limit", 7.0), bias=True, stacked="rows" if is_packed else "columns", interleaved=True,
        )  # fmt: skip
    m.ignore("*_blocks", "*_scales")
    heads.head(cfg, m, m.rms_norm(x, f"{stem}norm", cfg.rms_norm_eps), stem)
