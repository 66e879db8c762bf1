"""The projections of attention and MLP with Llama's tensor names, which most families use."""

from .blocks import Block, Value
from .config import ModelConfig


def qkv(cfg: ModelConfig, layer: Block, x: Value, *, bias: bool = False) -> list[Value]:
    """self_attn.{q,k,v}_proj of x: the values q, k and v."""
    q_width, kv_width = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    return layer.linear(x, names, [q_width, kv_width, kv_width], bias=bias)


def out(cfg: ModelConfig, layer: Block, x: Value, *, bias: bool = False) -> Value:
    """self_attn.o_proj of the heads' outputs."""
    return layer.linear(x, "self_attn.o_proj", cfg.hidden_size, bias=bias)


def mlp(cfg: ModelConfig, layer: Block, x: Value, *, act: str | None = None, bias: bool = False) -> Value:
    """mlp.{gate,up,down}_proj with activation `act`; None: hidden_act."""
    names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    return layer.gated_mlp(x, *names, cfg.intermediate_size, act=act or cfg.hidden_act, bias=bias)


def fused_mlp(cfg: ModelConfig, layer: Block, x: Value) -> Value:
    """mlp.gate_up_proj, with the gate's rows before up's, and mlp.down_proj."""
    width = cfg.intermediate_size
    gate, up = layer.split(layer.linear(x, "mlp.gate_up_proj", 2 * width), [width, width])
    return layer.linear(layer.gated(gate, up, cfg.hidden_act), "mlp.down_proj", cfg.hidden_size)
