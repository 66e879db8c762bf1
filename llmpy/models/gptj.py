"""GPT-J and CodeGen."""

import numpy as np

from . import heads
from .blocks import Model
from .config import ModelConfig
from .gpt2 import MASKS, NAMES
from .registry import architecture
from .rope import Rope

CHECKPOINTS = "GPT-J 6B; CodeGen 350M to 16B"

DEFAULTS = {"layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "hidden_act": "gelu_new", "rotary_dim": 64}
BUFFERS = (*MASKS, "*.attn.causal_mask", "*.attn.embed_positions")


@architecture(*heads.names("GPTJ"), defaults=DEFAULTS, renames=NAMES, ignore=BUFFERS)
def gptj(cfg: ModelConfig, m: Model) -> None:
    """GPT-J decoder: attention and MLP read the same layer norm; interleaved rope on a part of each head."""
    write(cfg, m, packed=False)


@architecture(*heads.names("CodeGen"), defaults=DEFAULTS, renames=NAMES, ignore=BUFFERS)
def codegen(cfg: ModelConfig, m: Model) -> None:
    """CodeGen decoder: GPT-J with one tensor of q, v and k; each quarter of the heads has its rows of q, v and k together."""
    write(cfg, m, packed=True)


def write(cfg: ModelConfig, m: Model, *, packed: bool) -> None:
    """Writes the program."""
    width, turned = cfg.hidden_size, cfg.size("rotary_dim", cfg.head_dim)
    eps, inner = cfg.positive("layer_norm_epsilon", 1e-5), cfg.size("intermediate_size", 4 * width)
    exponents = np.arange(0, turned, 2, dtype=np.float32) / turned
    rope = Rope((10000.0**-exponents).astype(np.float32), interleaved=True)
    stem = m.stem("transformer.", "wte")
    x = m.embed(f"{stem}wte")
    for layer in m.layers(f"{stem}h", cfg.num_layers):
        h = layer.layer_norm(x, "ln_1", eps)
        if packed:
            q, v, k = layer.linear(h, "attn.qkv_proj", [width] * 3, groups=4)
        else:
            q, k, v = layer.linear(h, ["attn.q_proj", "attn.k_proj", "attn.v_proj"], [width] * 3)
        q, k = layer.rope(q, k, rope)
        mlp = layer.mlp(h, "mlp.fc_in", "mlp.fc_out", inner, act=cfg.hidden_act)
        x = x + (layer.linear(layer.attention(q, k, v), "attn.out_proj", width) + mlp)
    heads.head(cfg, m, m.layer_norm(x, f"{stem}ln_f", eps), stem, embedding="wte", bias=True)
