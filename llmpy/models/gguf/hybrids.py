"""GGUF files of families with recurrences."""

from .dense import GRANITE, PLAMO3
from .family import Family, Field, Fields, given, has, kinds, or_else, ratio
from .metadata import Metadata
from .mixtures import ROUTING, SHARED

NO_HEADS: Fields = {"num_attention_heads": 1}  # there is no attention
HAS_CONV_BIAS, HAS_IN_BIAS = has("blk.#.ssm_conv1d.bias"), has("blk.#.ssm_in.bias")
ATTENDS = kinds("attention.head_count_kv", "full_attention", "linear_attention")
MAMBA2: Fields = {
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_d_head": ratio("ssm.inner_size", "ssm.time_step_rank"),
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_n_groups": "ssm.group_count",
    "mamba_proj_bias": HAS_IN_BIAS,
    "mamba_conv_bias": HAS_CONV_BIAS,
}


def mamba_names(stem: str) -> dict[str, str]:
    """Names of the tensors of a Mamba or Mamba-2 mixer in module `stem`."""
    tensors = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "x_proj": "ssm_x", "dt_proj": "ssm_dt", "out_proj": "ssm_out",
               "A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias", "norm": "ssm_norm", "dt_layernorm": "ssm_dt_norm",
               "b_layernorm": "ssm_b_norm", "c_layernorm": "ssm_c_norm"}  # fmt: skip
    return {f"{stem}.{name}": place for name, place in tensors.items()}


BACKBONE = {"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm"}
FEED_FORWARD = {f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
MAMBA: Fields = {
    **NO_HEADS,
    "state_size": "ssm.state_size",
    "conv_kernel": "ssm.conv_kernel",
    "time_step_rank": "ssm.time_step_rank",
    "intermediate_size": "ssm.inner_size",
    "use_bias": HAS_IN_BIAS,
    "use_conv_bias": HAS_CONV_BIAS,
}


def spacing(layers: list[int], n_layers: int) -> tuple[int, int]:
    """The distance between the given layers, and the first of them."""
    return (layers[1] - layers[0] if len(layers) > 1 else n_layers, layers[0]) if layers else (1, 1)


def jamba_layers(key: str) -> dict[str, Field]:
    """Jamba's fields for the layers with attention ("attn") or with experts ("expert")."""
    tensor = {"attn": "blk.#.attn_q.weight", "expert": "blk.#.ffn_gate_inp.weight"}[key]
    return {
        f"{key}_layer_period": lambda meta: spacing(meta.with_tensor(tensor), meta.n_layers)[0],
        f"{key}_layer_offset": lambda meta: spacing(meta.with_tensor(tensor), meta.n_layers)[1],
    }


def shared_width(meta: Metadata) -> object:
    """The width of the shared MLP; some files store it as the width of a shared expert."""
    return meta.raw("expert_shared_feed_forward_length") or meta.raw("feed_forward_length")


def positions(meta: Metadata) -> str:
    """ "rope" or "nope": whether attention layers have rope."""
    return "nope" if meta.raw("rope.scaling.finetuned") is False else "rope"


def nemotron_kinds(meta: Metadata) -> list[str]:
    """The kind of each layer of Nemotron-H."""
    tensors = {"attention": "attn_q", "moe": "ffn_gate_inp", "mlp": "ffn_up", "mamba": "ssm_in"}
    layers = {kind: meta.with_tensor(f"blk.#.{tensor}.weight") for kind, tensor in tensors.items()}
    return [next((kind for kind in layers if layer in layers[kind]), "mamba") for layer in range(meta.n_layers)]


def plamo_step(meta: Metadata) -> int:
    """PLaMo 2's mamba_step. The middle layer of each group of mamba_step layers has attention. In a model of at most half a
    group the last layer has attention."""
    attend = meta.with_tensor("blk.#.attn_qkv.weight")
    if attend == [meta.n_layers - 1]:
        return 2 * meta.n_layers
    return attend[1] - attend[0] if len(attend) > 1 else 2 * attend[0] if attend else 2 * meta.n_layers + 1


TABLES = (
    Family(name="mamba", architecture="FalconMambaForCausalLM", when=given("ssm.dt_b_c_rms"), layers="backbone.layers.#.",
           outer=BACKBONE, names={"norm": "attn_norm", **mamba_names("mixer")}, fields=MAMBA),
    Family(name="mamba", architecture="MambaForCausalLM", layers="backbone.layers.#.", outer=BACKBONE,
           names={"norm": "attn_norm", **mamba_names("mixer")}, fields=MAMBA),
    Family(name="mamba2", architecture="Mamba2ForCausalLM", layers="backbone.layers.#.", outer=BACKBONE,
           names={"norm": "attn_norm", **mamba_names("mixer")},
           fields={**NO_HEADS, "num_heads": "ssm.time_step_rank", "head_dim": ratio("ssm.inner_size", "ssm.time_step_rank"),
                   "state_size": "ssm.state_size", "n_groups": "ssm.group_count", "conv_kernel": "ssm.conv_kernel",
                   "use_bias": HAS_IN_BIAS, "use_conv_bias": HAS_CONV_BIAS}),
    Family(name="jamba", architecture="JambaForCausalLM", outer={"model.final_layernorm": "output_norm"},
           names={"pre_ff_layernorm": "ffn_norm", **mamba_names("mamba"), **FEED_FORWARD,
                  "feed_forward.router": "ffn_gate_inp"},
           fields={**jamba_layers("attn"), **jamba_layers("expert"), "mamba_dt_rank": "ssm.time_step_rank",
                   "mamba_d_state": "ssm.state_size", "mamba_d_conv": "ssm.conv_kernel",
                   "mamba_expand": ratio("ssm.inner_size", "embedding_length"),
                   "mamba_proj_bias": HAS_IN_BIAS, "mamba_conv_bias": HAS_CONV_BIAS,
                   "num_experts": or_else("expert_count", 1)}),
    Family(name="granitehybrid", architecture="GraniteMoeHybridForCausalLM", interleaved=True,
           names={**mamba_names("mamba"), "block_sparse_moe.router.layer": "ffn_gate_inp",
                  "shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp"),
                  "shared_mlp.output_linear": "ffn_down_shexp"},
           when=given("expert_count"),
           fields={**MAMBA2, **GRANITE, "layer_types": ATTENDS, "shared_intermediate_size": "expert_shared_feed_forward_length",
                   "position_embedding_type": positions}),
    Family(name="granitehybrid", architecture="GraniteMoeHybridForCausalLM", interleaved=True,
           names={**mamba_names("mamba"), "shared_mlp.input_linear": ("ffn_gate", "ffn_up"),
                  "shared_mlp.output_linear": "ffn_down"},
           fields={**MAMBA2, **GRANITE, "layer_types": ATTENDS, "num_local_experts": 0,
                   "shared_intermediate_size": shared_width,
                   "position_embedding_type": positions}),
    *(Family(name=name, architecture="NemotronHForCausalLM", layers="backbone.layers.#.", outer=BACKBONE,
             names={"norm": "attn_norm", **mamba_names("mixer"), "mixer.gate": "ffn_gate_inp",
                    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
                    **{f"mixer.{x}_proj": f"attn_{x}" for x in "qkv"}, "mixer.o_proj": "attn_output",
                    "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down",
                    "mixer.shared_experts.up_proj": "ffn_up_shexp", "mixer.shared_experts.down_proj": "ffn_down_shexp",
                    "mixer.fc1_latent_proj": "ffn_latent_down", "mixer.fc2_latent_proj": "ffn_latent_up"},
             fields={**ROUTING, "layers_block_type": nemotron_kinds, "mamba_num_heads": "ssm.time_step_rank",
                     "mamba_head_dim": ratio("ssm.inner_size", "ssm.time_step_rank"), "ssm_state_size": "ssm.state_size",
                     "n_groups": "ssm.group_count", "conv_kernel": "ssm.conv_kernel", "moe_latent_size": "moe_latent_size",
                     "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
                     "use_bias": HAS_IN_BIAS, "use_conv_bias": HAS_CONV_BIAS,
                     "mlp_bias": lambda meta: meta.has("blk.#.ffn_down.bias") or meta.has("blk.#.ffn_down_shexp.bias")})
      for name in ("nemotron_h", "nemotron_h_moe")),
    Family(name="lfm2", architecture="Lfm2ForCausalLM", outer={"model.embedding_norm": "token_embd_norm"},
           names={"operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "conv.conv": "shortconv.conv",
                  "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj",
                  "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm",
                  "self_attn.out_proj": "attn_output",
                  "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down"},
           fields={"layer_types": kinds("attention.head_count_kv", "full_attention", "conv"),
                   "conv_L_cache": "shortconv.l_cache", "conv_bias": has("blk.#.shortconv.conv.bias"),
                   "block_auto_adjust_ff_dim": False}),
    Family(name="falcon-h1", architecture="FalconH1ForCausalLM", outer={"model.final_layernorm": "output_norm"},
           has_factors=True,
           names={"pre_ff_layernorm.weight": "ffn_norm", **mamba_names("mamba"), **FEED_FORWARD},
           fields={**MAMBA2, "mamba_d_ssm": "ssm.inner_size", "mamba_rms_norm": has("blk.#.ssm_norm.weight"),
                   "mamba_norm_before_gate": False, "projectors_bias": has("blk.#.ssm_out.bias")}),
    Family(name="qwen3next", architecture="Qwen3NextForCausalLM", has_offsets=True,
           grouped=("linear_attn.in_proj_ba", "self_attn.q_proj"),
           names={**SHARED, "post_attention_layernorm": "post_attention_norm",
                  "linear_attn.in_proj_qkvz": ("attn_qkv", "attn_gate"), "linear_attn.in_proj_ba": "ssm_ba",
                  "linear_attn.conv1d": "ssm_conv1d", "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
                  "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out"},
           fields={"linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank",
                   "linear_key_head_dim": "ssm.state_size",
                   "linear_value_head_dim": ratio("ssm.inner_size", "ssm.time_step_rank"),
                   "linear_conv_kernel_dim": "ssm.conv_kernel", "norm_topk_prob": True,
                   "layer_types": lambda meta: [
                       "full_attention" if meta.has(f"blk.{layer}.attn_output.weight") else "linear_attention"
                       for layer in range(meta.n_layers)]}),
    Family(name="plamo2", architecture="Plamo2ForCausalLM", has_offsets=True, layers="model.layers.layers.#.",
           grouped=("mixer.in_proj",),
           names={**PLAMO3, "mixer.q_weight": "attn_q_norm.weight", "mixer.k_weight": "attn_k_norm.weight",
                  **mamba_names("mixer"), "mixer.bcdt_proj": "ssm_x", "mixer.dt_norm_weight": "ssm_dt_norm",
                  "mixer.B_norm_weight": "ssm_b_norm", "mixer.C_norm_weight": "ssm_c_norm"},
           fields={"mamba_num_heads": "ssm.time_step_rank", "mamba_d_state": "ssm.state_size",
                   "mamba_d_conv": "ssm.conv_kernel", "rope_local_theta": or_else("rope.freq_base", 10000.0),
                   "mamba_step": plamo_step,
                   "full_attention_idx": lambda meta: meta.with_tensor("blk.#.attn_qkv.weight")}),
)  # fmt: skip
