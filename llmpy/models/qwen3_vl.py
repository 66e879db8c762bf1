"""Qwen3-VL: the tower of Qwen2-VL with learned positions, whose features also enter behind the first layers of Qwen3 or
Qwen3-MoE."""

from . import qwen2_vl, towers
from .blocks import Block, Model, Value
from .config import ModelConfig
from .registry import architecture

CHECKPOINTS = "Qwen3-VL 2B to 32B, Qwen3-VL-30B-A3B and 235B-A22B"
LIMITS = "images; clips are refused"


def _merge(cfg: ModelConfig, b: Block, x: Value, n: int, *, norm_first: bool) -> Value:
    """n patches joined, through a norm and two linears."""
    h = b.group(b.layer_norm(x, "norm", 1e-6), n) if norm_first else b.layer_norm(b.group(x, n), "norm", 1e-6)
    h = b.act(b.linear(h, "linear_fc1", h.width, bias=True), "gelu")
    return b.linear(h, "linear_fc2", cfg.hidden_size, bias=True)


@architecture(
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    texts={"qwen3_vl_text": "Qwen3ForCausalLM", "qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
    defaults={"stacks_experts": True, "norm_topk_prob": True},
)
def qwen3_vl(cfg: ModelConfig, m: Model) -> None:
    """Blocks with layer norms and a plain MLP; features of some blocks are added behind the text's first layers."""
    vision, v, x, rope = qwen2_vl.begin(cfg, m, bias=True)
    positions, n = vision.size("num_position_embeddings", 2304), vision.size("spatial_merge_size", 2) ** 2
    x = x + v.embed_taps("pos_embed.weight", (positions, vision.hidden_size), taps=4)
    deep = vision.raw.get("deepstack_visual_indexes", [8, 16, 24])
    found: list[Value] = []
    for i, block in enumerate(v.layers("blocks", vision.num_layers)):
        q, k, u = block.linear(block.layer_norm(x, "norm1", 1e-6), "attn.qkv", [x.width] * 3, bias=True)
        q, k = block.rope(q, k, rope)
        x = x + block.linear(block.row_attention(q, k, u), "attn.proj", x.width, bias=True)
        h = block.layer_norm(x, "norm2", 1e-6)
        act = vision.get("hidden_act", "gelu_pytorch_tanh")
        x = x + block.mlp(h, "mlp.linear_fc1", "mlp.linear_fc2", vision.intermediate_size, act=act)
        if isinstance(deep, list) and i in deep:
            b = v.at(f"{v.prefix}deepstack_merger_list.{deep.index(i)}.")
            found.append(_merge(cfg, b, x, n, norm_first=False))
    v.features(_merge(cfg, v.at(f"{v.prefix}merger."), x, n, norm_first=True), *found)
    m.injections = [cfg.hidden_size * (1 + i) for i in range(len(found))]
    towers.text(cfg, m)
