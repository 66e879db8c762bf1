"""BLOOM."""

from . import alibi, heads
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "BLOOM 560M to 176B, BLOOMZ"


@architecture(
    *heads.names("Bloom"),
    defaults={"layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "tie_word_embeddings": True},
    renames={
        "n_embed": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "seq_length": "max_position_embeddings",
    },
)
def bloom(cfg: ModelConfig, m: Model) -> None:
    """BLOOM decoder: ALiBi slopes instead of positions, a norm after the embedding, q, k and v packed head by head."""
    width, n_heads, eps = cfg.hidden_size, cfg.num_attention_heads, cfg.positive("layer_norm_epsilon", 1e-5)
    slopes = m.constant(alibi.slopes(n_heads))
    from_norm = cfg.get("apply_residual_connection_post_layernorm", False)
    stem = m.stem("transformer.", "word_embeddings")
    x = m.layer_norm(m.embed(f"{stem}word_embeddings"), f"{stem}word_embeddings_layernorm", eps)
    for layer in m.layers(f"{stem}h", cfg.num_layers):
        h = layer.layer_norm(x, "input_layernorm", eps)
        q, k, v = layer.linear(h, "self_attention.query_key_value", [width] * 3, bias=True, groups=n_heads)
        a = layer.linear(layer.attention(q, k, v, slopes=slopes), "self_attention.dense", width, bias=True)
        x = (h if from_norm else x) + a
        h = layer.layer_norm(x, "post_attention_layernorm", eps)
        y = layer.mlp(h, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", 4 * width, act="gelu_pytorch_tanh")
        x = (h if from_norm else x) + y
    heads.head(cfg, m, m.layer_norm(x, f"{stem}ln_f", eps), stem, embedding="word_embeddings")
