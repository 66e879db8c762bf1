"""OPT."""

from . import heads
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "OPT 125M to 66B"


@architecture(
    *heads.names("OPT"),
    defaults={
        "hidden_act": "relu",
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "enable_bias": True,
        "tie_word_embeddings": True,
    },
    renames={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
)
def opt(cfg: ModelConfig, m: Model) -> None:
    """OPT decoder: learned positions, layer norms before or (350M) after each branch, a plain MLP."""
    cfg.only("layer_norm_elementwise_affine", True)
    width, eps, bias, is_first = cfg.hidden_size, 1e-5, cfg.get("enable_bias", True), cfg.get("do_layer_norm_before", True)
    outer = cfg.size("word_embed_proj_dim", width)
    stem = m.stem("model.", "decoder.embed_tokens") + "decoder."
    x = m.embed(f"{stem}embed_tokens", width=outer)
    x = m.linear(x, f"{stem}project_in", width) if outer != width else x
    x = x + m.embed_positions(f"{stem}embed_positions", cfg.max_position_embeddings + 2, first=2)
    for layer in m.layers(f"{stem}layers", cfg.num_layers):
        h = layer.layer_norm(x, "self_attn_layer_norm", eps) if is_first else x
        names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        q, k, v = layer.linear(h, names, [width] * 3, bias=bias)
        x = x + layer.linear(layer.attention(q, k, v), "self_attn.out_proj", width, bias=bias)
        x = x if is_first else layer.layer_norm(x, "self_attn_layer_norm", eps)
        h = layer.layer_norm(x, "final_layer_norm", eps) if is_first else x
        x = x + layer.mlp(h, "fc1", "fc2", cfg.intermediate_size, act=cfg.hidden_act, bias=bias)
        x = x if is_first else layer.layer_norm(x, "final_layer_norm", eps)
    if is_first and not cfg.get("_remove_final_layer_norm", False):
        x = m.layer_norm(x, f"{stem}final_layer_norm", eps)
    x = m.linear(x, f"{stem}project_out", outer) if outer != width else x
    heads.head(cfg, m, x, stem)
