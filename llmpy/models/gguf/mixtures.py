"""GGUF files of families with mixtures of experts."""

from collections.abc import Callable

from .dense import GRANITE, WINDOWS
from .family import Family, Fields, Names, has, has_head_bias, or_else
from .metadata import Metadata

SHARED: Names = {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
ROUTING: Fields = {
    "n_group": or_else("expert_group_count", 1),
    "topk_group": or_else("expert_group_used_count", 1),
    "routed_scaling_factor": or_else("expert_weights_scale", 1.0),
    "norm_topk_prob": or_else("expert_weights_norm", False),
    "n_shared_experts": or_else("expert_shared_count", 0),
    "first_k_dense_replace": or_else("leading_dense_block_count", 0),
}
LATENT: Names = {
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
}


def latent_size(part: str) -> Callable[[Metadata], int]:
    """Elements of a head's key or value; files with keys and values in one tensor lack the _mla metadata keys."""

    def size(meta: Metadata) -> int:
        return meta.get(f"attention.{part}_length_mla", int, 0) or meta.need(f"attention.{part}_length", int)

    return size


def nope_dim(meta: Metadata) -> int:
    """Elements of a head's key without rope."""
    return latent_size("key")(meta) - meta.need("rope.dimension_count", int)


DEEPSEEK: Fields = {
    **ROUTING,
    "head_dim": "rope.dimension_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "qk_nope_head_dim": nope_dim,
    "v_head_dim": latent_size("value"),
    "attention_bias": has("blk.#.attn_kv_a_mqa.bias"),
}


def choice(meta: Metadata) -> str:
    """topk_method of DeepSeek-V2."""
    return "group_limited_greedy" if meta.get("expert_group_count", int, 1) > 1 else "greedy"


def is_sigmoid(meta: Metadata) -> bool:
    """Whether experts are chosen by sigmoids, as DeepSeek-V3 does."""
    return meta.raw("expert_gating_func") == 2


def expert_width(meta: Metadata) -> int:
    """Width of an expert of Qwen2-MoE; the first files store the sum of the chosen experts' widths."""
    chosen = max(meta.need("expert_used_count", int), 1)
    return meta.get("expert_feed_forward_length", int, 0) or meta.need("feed_forward_length", int) // chosen


TABLES = (
    Family(name="qwen2moe", architecture="Qwen2MoeForCausalLM", names=SHARED,
           fields={"norm_topk_prob": or_else("expert_weights_norm", False), "moe_intermediate_size": expert_width}),
    Family(name="qwen3moe", architecture="Qwen3MoeForCausalLM", fields={"norm_topk_prob": True}),
    Family(name="olmoe", architecture="OlmoeForCausalLM",
           fields={"norm_topk_prob": or_else("expert_weights_norm", False), "clip_qkv": "attention.clamp_kqv"}),
    Family(name="granitemoe", architecture="GraniteMoeForCausalLM", interleaved=True, fields=GRANITE,
           names={"block_sparse_moe.router.layer": "ffn_gate_inp"}),
    Family(name="glm4moe", architecture="Glm4MoeForCausalLM", names={"post_attention_layernorm": "post_attention_norm"},
           fields={**ROUTING, "use_qk_norm": has("blk.#.attn_q_norm.weight")}),
    Family(name="ernie4_5-moe", architecture="Ernie4_5_MoeForCausalLM",
           names={"mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias"},
           fields={"use_bias": has_head_bias, "moe_layer_start_index": or_else("leading_dense_block_count", 0),
                   "moe_layer_interval": or_else("interleave_moe_layer_step", 1),
                   "moe_num_shared_experts": or_else("expert_shared_count", 0)}),
    Family(name="deepseek2", architecture="DeepseekV3ForCausalLM", when=is_sigmoid, names=LATENT, fields=DEEPSEEK),
    Family(name="deepseek2", architecture="DeepseekV2ForCausalLM", names=LATENT,
           fields={**DEEPSEEK, "topk_method": choice}),
    Family(name="gpt-oss", architecture="GptOssForCausalLM", rope={"truncate": False},
           names={"post_attention_layernorm": "post_attention_norm", "self_attn.sinks": "attn_sinks.weight",
                  "mlp.router": "ffn_gate_inp"},
           fields=WINDOWS),
    Family(name="llama4", architecture="Llama4ForCausalLM",
           names={"feed_forward.router": "ffn_gate_inp",
                  **{f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
                  **{f"feed_forward.shared_expert.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")}},
           fields={"intermediate_size": "expert_feed_forward_length", "intermediate_size_mlp": "feed_forward_length",
                   "interleave_moe_layer_step": "interleave_moe_layer_step",
                   "use_qk_norm": lambda meta: meta.need("expert_count", int) != 128}),
)  # fmt: skip
