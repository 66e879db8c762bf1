"""GPT-2, and GPT-BigCode: StarCoder, SantaCoder."""

from . import heads
from .blocks import Model
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "GPT-2 124M to 1.5B, DistilGPT2; StarCoder, StarCoderBase, SantaCoder"

NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
}
DEFAULTS = {"layer_norm_epsilon": 1e-5, "max_position_embeddings": 1024, "tie_word_embeddings": True}
MASKS = ("*.attn.bias", "*.attn.masked_bias")


@architecture(
    *("GPT2LMHeadModel", "GPT2Model", "GPT2ForSequenceClassification"),
    defaults={**DEFAULTS, "hidden_act": "gelu_new"},
    renames=NAMES,
    ignore=MASKS,
)
def gpt2(cfg: ModelConfig, m: Model) -> None:
    """GPT-2 decoder: learned positions, layer norms, a plain MLP; matrices are stored [in, out]."""
    write(cfg, m, [cfg.hidden_size] * 3, transposed=True)


@architecture(
    *heads.names("GPTBigCode"),
    defaults={**DEFAULTS, "hidden_act": "gelu_pytorch_tanh", "multi_query": True},
    renames=NAMES,
    ignore=MASKS,
)
def gpt_bigcode(cfg: ModelConfig, m: Model) -> None:
    """GPT-BigCode decoder: GPT-2 where all heads share one head of k and v, or q, k and v are packed head by head."""
    is_shared = cfg.get("multi_query", True)
    kv_width = cfg.head_dim if is_shared else cfg.hidden_size
    write(cfg, m, [cfg.hidden_size, kv_width, kv_width], groups=1 if is_shared else cfg.num_attention_heads)


def write(cfg: ModelConfig, m: Model, widths: list[int], *, groups: int = 1, transposed: bool = False) -> None:
    """Writes the program; `widths` (of q, k and v), `groups` and `transposed` are arguments of `linear` for their tensor."""
    cfg.without("add_cross_attention")
    eps, inner = cfg.positive("layer_norm_epsilon", 1e-5), cfg.size("intermediate_size", 4 * cfg.hidden_size)
    scale = cfg.head_dim**-0.5 if cfg.get("scale_attn_weights", True) else 1.0
    by_layer = cfg.get("scale_attn_by_inverse_layer_idx", False)
    stem = m.stem("transformer.", "wte")
    x = m.embed(f"{stem}wte") + m.embed_positions(f"{stem}wpe", cfg.max_position_embeddings)
    for i, layer in enumerate(m.layers(f"{stem}h", cfg.num_layers)):
        h = layer.layer_norm(x, "ln_1", eps)
        q, k, v = layer.linear(h, "attn.c_attn", widths, bias=True, groups=groups, transposed=transposed)
        h = layer.attention(q, k, v, scale=scale / (i + 1) if by_layer else scale)
        x = x + layer.linear(h, "attn.c_proj", cfg.hidden_size, bias=True, transposed=transposed)
        h = layer.layer_norm(x, "ln_2", eps)
        x = x + layer.mlp(h, "mlp.c_fc", "mlp.c_proj", inner, act=cfg.hidden_act, transposed=transposed)
    heads.head(cfg, m, m.layer_norm(x, f"{stem}ln_f", eps), stem, embedding="wte")
