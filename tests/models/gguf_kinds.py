"""The tiny GGUF files: their cases, architectures and conversions."""

import numpy as np
from gguf_files import (
    Kind,
    apart,
    column,
    columns,
    decay,
    decay_column,
    dropped,
    experts_of_llama,
    grouped,
    halves,
    heads_apart,
    heads_of_latents,
    in_groups,
    key_heads,
    plus,
    renamed,
    squeezed,
    transposed,
    turned,
)

TURNED = (r"\.[qk]_proj\.", turned)
TABLE_GELU = 5e-4  # llama.cpp looks it up in a table of float16, which has the form of the hyperbolic tangent for all
TIED = (r"lm_head", dropped)
BIAS_OF_CHOICE = (r"e_score_correction_bias", renamed("e_score_correction_bias", "e_score_correction.bias"))
PLAMO = [(r"(pre_mixer|pre_mlp)_norm\.", plus(1.0)), (r"post_mixer_norm\.", plus(1 / 5)), (r"post_mlp_norm\.", plus(5**-1.5))]
MIXER = [(r"\.A_log", decay_column), (r"\.D$", column), (r"dt_bias", renamed("dt_bias", "dt_proj.bias")),
         (r"conv1d\.weight", squeezed)]  # fmt: skip
SINGLE = [(r"\.A_log", decay), (r"conv1d\.weight", squeezed)]
PLAMO2 = [*PLAMO, (r"model\.norm\.", plus(1.0)), *SINGLE, (r"dt_bias", renamed("dt_bias", "dt_proj.bias")),
          (r"_norm_weight", renamed("_norm_weight", "_norm.weight")), (r"\.[qk]_weight", renamed("_weight", ".weight")),
          TIED]  # fmt: skip


def scales(cfg):
    return {"attention.scale": cfg["attention_multiplier"], "embedding_scale": cfg["embedding_multiplier"],
            "residual_scale": cfg["residual_multiplier"], "logit_scale": cfg["logits_scaling"]}  # fmt: skip


def all_heads(cfg):
    return {"attention.head_count_kv": cfg["num_attention_heads"]}


def far(cfg):
    return {"rope.freq_base_swa": 5e5, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32}  # fmt: skip


def slides(cfg):
    return {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in cfg["layer_types"]]}


def attends(cfg, *names):
    return {"attention.head_count_kv": [cfg["num_key_value_heads"] if kind in names else 0 for kind in cfg["layer_types"]]}


def mamba2(cfg):
    return {"ssm.conv_kernel": cfg["mamba_d_conv"], "ssm.state_size": cfg["mamba_d_state"],
            "ssm.group_count": cfg["mamba_n_groups"], "ssm.time_step_rank": cfg["mamba_n_heads"],
            "ssm.inner_size": cfg["mamba_n_heads"] * cfg["mamba_d_head"]}  # fmt: skip


def bamba(cfg):
    kinds = ["attention" if i in cfg["attn_layer_indices"] else "mamba" for i in range(cfg["num_hidden_layers"])]
    return {**mamba2(cfg), **attends({**cfg, "layer_types": kinds}, "attention"), "rope.scaling.finetuned": True}


def mamba(cfg):
    return {"attention.head_count": 0, "feed_forward_length": 0, "attention.key_length": None, "attention.value_length": None,
            "rope.dimension_count": None, "ssm.conv_kernel": cfg["conv_kernel"], "ssm.state_size": cfg["state_size"],
            "attention.layer_norm_rms_epsilon": cfg["layer_norm_epsilon"], "attention.layer_norm_epsilon": None}  # fmt: skip


def routing(cfg):
    return {"expert_group_count": cfg["n_group"], "expert_group_used_count": cfg["topk_group"],
            "expert_weights_scale": cfg["routed_scaling_factor"], "expert_weights_norm": cfg["norm_topk_prob"],
            "expert_gating_func": 2, "expert_shared_count": cfg["n_shared_experts"],
            "leading_dense_block_count": cfg["first_k_dense_replace"]}  # fmt: skip


def latent(cfg):
    n, r, d, v = (cfg[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    rope = cfg["rope_parameters"]
    group = {"expert_group_count": cfg.get("n_group"), "expert_group_used_count": cfg.get("topk_group")}
    far = {} if rope["rope_type"] == "default" else {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"]}  # fmt: skip
    return {**group, "attention.head_count_kv": 1, "attention.key_length": n + r, "attention.value_length": n,
            "rope.dimension_count": r,
            "attention.key_length_mla": d + r, "attention.value_length_mla": v, "attention.kv_lora_rank": n,
            "attention.q_lora_rank": cfg["q_lora_rank"], "expert_shared_count": cfg["n_shared_experts"],
            "leading_dense_block_count": cfg["first_k_dense_replace"], "expert_weights_norm": cfg["norm_topk_prob"],
            "expert_weights_scale": cfg["routed_scaling_factor"], **far}  # fmt: skip


def whole_keys(cfg):
    """Metadata as in older files, with keys and values of latents in one tensor."""
    return {"attention.key_length": cfg["qk_nope_head_dim"] + cfg["qk_rope_head_dim"],
            "attention.value_length": cfg["v_head_dim"], "attention.head_count_kv": cfg["num_attention_heads"],
            "attention.key_length_mla": None, "attention.value_length_mla": None}  # fmt: skip


def jamba(cfg):
    kinds = [i % cfg["attn_layer_period"] == cfg["attn_layer_offset"] for i in range(cfg["num_hidden_layers"])]
    return {"attention.head_count_kv": [2 if kind else 0 for kind in kinds], "ssm.conv_kernel": cfg["mamba_d_conv"],
            "ssm.state_size": cfg["mamba_d_state"], "ssm.inner_size": cfg["mamba_expand"] * cfg["hidden_size"],
            "ssm.time_step_rank": cfg["mamba_dt_rank"]}  # fmt: skip


def nemotron(cfg):
    kinds = cfg["layers_block_type"]
    return {"attention.head_count_kv": [2 if kind in ("attention", "full_attention") else 0 for kind in kinds],
            "feed_forward_length": [24 if kind == "moe" else 96 if kind == "mlp" else 0 for kind in kinds],
            "ssm.conv_kernel": cfg["conv_kernel"], "ssm.state_size": cfg["ssm_state_size"], "ssm.group_count": cfg["n_groups"],
            "ssm.time_step_rank": cfg["mamba_num_heads"], "ssm.inner_size": cfg["mamba_num_heads"] * cfg["mamba_head_dim"],
            "attention.layer_norm_rms_epsilon": cfg["layer_norm_epsilon"]}  # fmt: skip


def experts_of_nemotron(cfg):
    return {**nemotron(cfg), "expert_group_count": cfg["n_group"], "expert_group_used_count": cfg["topk_group"],
            "expert_shared_feed_forward_length": cfg["moe_shared_expert_intermediate_size"], "expert_shared_count": 1,
            "expert_weights_norm": True, "expert_weights_scale": cfg["routed_scaling_factor"], "expert_gating_func": 2,
            "moe_latent_size": cfg.get("moe_latent_size")}  # fmt: skip


def falcon_h1(name, values, cfg):
    """Its factors are in the weights."""
    enter, leave, inner, states = 1.3, 0.8, 64, 16
    if "in_proj" in name:
        sizes, on = [inner, inner, states, states, 4], cfg["ssm_multipliers"]
        factors = np.repeat(np.float32(on), sizes)[:, None] * np.float32(cfg["ssm_in_multiplier"])
    else:
        factors = np.float32({"up_proj": 1,
            "down_proj": cfg["mlp_multipliers"][1], "gate_proj": cfg["mlp_multipliers"][0], "q_proj": enter, "v_proj": enter,
            "k_proj": enter * cfg["key_multiplier"], "o_proj": leave, "out_proj": cfg["ssm_out_multiplier"],
            "lm_head": cfg["lm_head_multiplier"], "embed_tokens": cfg["embedding_multiplier"],
        }[name.split(".")[-2]])  # fmt: skip
    return [(name, values * factors)]


def plamo2(cfg):
    kinds = [i % 2 == 1 for i in range(cfg["num_hidden_layers"])]
    return {"attention.head_count": [4 if kind else 0 for kind in kinds],
            "attention.head_count_kv": [2 if kind else 0 for kind in kinds],
            "attention.key_length": 24, "attention.value_length": 24, "rope.freq_base": 20000.0, "rope.dimension_count": None,
            "ssm.state_size": 8, "ssm.conv_kernel": 4, "ssm.time_step_rank": 6, "ssm.inner_size": 144,
            "ssm.group_count": 0}  # fmt: skip


def qwen3_next(cfg):
    return {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 64,
            "expert_shared_feed_forward_length": 32, "rope.dimension_count": 4}  # fmt: skip


QWEN3_NEXT_RULES = [
    (r"\.A_log", decay), (r"dt_bias", renamed("dt_bias", "dt_proj.bias")), (r"conv1d\.weight", squeezed),
    (r"in_proj_qkvz", key_heads), (r"shared_expert_gate", squeezed), (r"linear_attn\.norm", plus(0.0)),
    (r"norm\.weight", plus(1.0)),
]  # fmt: skip
HYBRID_RULES = [*MIXER, (r"mamba\.norm\.", in_groups("mamba_n_groups")), TURNED]
# llama.cpp chooses another program by the number of layers alone.
DEEPSEEK_LITE, BAICHUAN_7B, COMMAND_R_PLUS, EXAONE_32B = ({"num_hidden_layers": n} for n in (27, 32, 64, 64))
BAICHUAN_13B = {"num_hidden_layers": 40, "hidden_size": 160}
KINDS = {kind.name or kind.case: kind for kind in [
    Kind("llama", "llama", rules=[TURNED]),
    Kind("llama-bias", "llama", rules=[TURNED], name="internlm3"),
    Kind("llama-llama3", "llama", rules=[TURNED]),
    Kind("llama-linear", "llama", more=lambda cfg: {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, rules=[TURNED]),
    Kind("llama-yarn", "llama", more=far, rules=[TURNED]),
    Kind("qwen2", "qwen2"),
    Kind("qwen3", "qwen3", {"attention_bias": False}),
    Kind("smollm3", "smollm3", rules=[TURNED, TIED]),
    Kind("arcee", "arcee", {"attention_bias": False, "mlp_bias": False}, rules=[TURNED]),
    Kind("seed_oss", "seed_oss", {"attention_out_bias": False, "mlp_bias": False}),
    Kind("olmo", "olmo", {"attention_bias": False},
         lambda cfg: {"attention.clamp_kqv": 0.5, "attention.layer_norm_epsilon": 1e-5}, [TURNED]),
    Kind("olmo2", "olmo2"),
    Kind("olmo3", "olmo2", {"attention_bias": False},
         lambda cfg: {**slides(cfg), **far(cfg), "rope.scaling.yarn_attn_factor": 0.1 * float(np.log(4)) + 1}),
    Kind("olmo3", "olmo2", {"attention_bias": False},
         lambda cfg: {**slides(cfg), **far(cfg), "rope.scaling.attn_factor": 0.1 * float(np.log(4)) + 1},
         bound=None, name="olmo3-first"),
    Kind("exaone4", "exaone4", EXAONE_32B, slides),
    Kind("exaone4-full", "exaone4"),
    Kind("granite", "granite", more=scales, rules=[TURNED]),
    Kind("granite", "minicpm", {"attention_multiplier": 0.25},
         lambda cfg: {**scales(cfg), "attention.scale": None}, [TURNED], name="minicpm"),
    Kind("granite", "minicpm", {"attention_multiplier": 0.25, "embedding_multiplier": 12.0,
                                "residual_multiplier": 1.4 / 2**0.5, "logits_scaling": 0.25},
         rules=[TURNED], bound=None, name="minicpm-first"),
    Kind("granite", "minicpm",
         {"attention_multiplier": 0.25, "max_position_embeddings": 256,
          "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256,
                              "short_factor": [1 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}},
         lambda cfg: {**scales(cfg), "attention.scale": None, "rope.scaling.type": "longrope", "context_length": 256}, [TURNED],
         name="minicpm-longrope"),
    Kind("granite_moe", "granitemoe", {"shared_intermediate_size": None}, scales,
         [TURNED, (r"input_linear", halves("mlp.experts.gate_proj", "mlp.experts.up_proj"))]),
    Kind("gemma", "gemma", {"attention_bias": False}, rules=[(r"norm\.weight", plus(1.0)), TIED], bound=TABLE_GELU),
    Kind("gemma2", "gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16},
         lambda cfg: {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
         [(r"norm\.weight", plus(1.0)), TIED], 10 * TABLE_GELU),  # its capped logits are small
    Kind("gemma3", "gemma3", {"query_pre_attn_scalar": 24, "sliding_window_pattern": 6, "num_hidden_layers": 6},
         lambda cfg: {"rope.freq_base_swa": 10000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
         [(r"norm\.weight", plus(1.0)), TIED], TABLE_GELU),
    Kind("phi", "phi2", {"num_key_value_heads": 4}, bound=TABLE_GELU),
    Kind("phi", "phi2", {"num_key_value_heads": 4}, bound=TABLE_GELU, name="phi-joined", joined=True),
    Kind("phi3", "phi3", {"sliding_window": None}),
    Kind("phi3-longrope", "phi3",
         more=lambda cfg: {"rope.scaling.original_context_length": 16,
                           "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(8) / np.log(16)))}),
    Kind("cohere", "command-r", {"attention_bias": False, **COMMAND_R_PLUS}, lambda cfg: {"logit_scale": 0.3}, [TIED]),
    Kind("cohere-plain", "command-r", more=lambda cfg: {"logit_scale": 0.0625}, rules=[TIED]),
    Kind("cohere2", "cohere2", more=lambda cfg: {"logit_scale": 0.3}, rules=[TIED]),
    Kind("glm", "chatglm"),
    Kind("glm4", "glm4"),
    Kind("nemotron", "nemotron", {"head_dim": 16, "attention_bias": False, "mlp_bias": False},
         rules=[(r"norm\.weight", plus(1.0))]),
    Kind("stablelm", "stablelm", more=lambda cfg: {"use_parallel_residual": True}),
    Kind("stablelm-norms", "stablelm"),
    Kind("stablelm-parallel", "stablelm", more=lambda cfg: {"use_parallel_residual": True}),
    Kind("apertus", "apertus", {"attention_bias": False},
         lambda cfg: {f"xielu.{name}": [float(cfg["tensors"][f"model.layers.{i}.mlp.act_fn.{name}"].item()) for i in range(2)]
                      for name in ("alpha_p", "alpha_n", "beta", "eps")}, [(r"act_fn", dropped)]),
    Kind("ernie4_5", "ernie4_5", {"use_bias": False}, rules=[TIED]),
    Kind("ernie4_5_moe", "ernie4_5-moe",
         more=lambda cfg: {"expert_count": 6, "expert_used_count": 2, "interleave_moe_layer_step": 1, "expert_shared_count": 2,
                           "leading_dense_block_count": 1, "expert_shared_feed_forward_length": 64},
         rules=[TIED, BIAS_OF_CHOICE]),
    Kind("plamo2", "plamo2", {"full_attention_idx": [1, 3], "rope_local_theta": 20000.0}, plamo2,
         PLAMO2, None),
    Kind("plamo2", "plamo2", {"full_attention_idx": [1, 3], "rope_local_theta": 20000.0},
         lambda cfg: {**plamo2(cfg), "attention.head_count": 4}, PLAMO2, name="plamo2-heads"),
    Kind("plamo3", "plamo3",
         more=lambda cfg: {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2, "rope.freq_base": 1e6,
                           "rope.freq_base_swa": 10000.0},
         rules=[*PLAMO, (r"(q|k|model\.)_?norm\.", plus(1.0))]),
    Kind("baichuan", "baichuan", BAICHUAN_7B, rules=[(r"W_pack", apart)]),
    Kind("baichuan-13b", "baichuan", BAICHUAN_13B, rules=[(r"W_pack", apart)]),
    Kind("internlm2-plain", "internlm2", rules=[(r"wqkv", grouped)]),
    Kind("gpt2", "gpt2", more=all_heads, rules=[(r"c_(attn|proj|fc)\.weight", transposed), TIED], bound=TABLE_GELU),
    Kind("gpt_bigcode", "starcoder", more=lambda cfg: {"attention.head_count_kv": 1}, rules=[TIED], bound=TABLE_GELU),
    Kind("starcoder2", "starcoder2", rules=[TIED], bound=None),
    Kind("starcoder2", "starcoder2", {"sliding_window": None}, rules=[TIED], bound=TABLE_GELU, name="starcoder2-full"),
    Kind("gpt_neox", "gptneox", more=lambda cfg: {**all_heads(cfg), "use_parallel_residual": True},
         rules=[(r"query_key_value", heads_apart("num_attention_heads"))], bound=TABLE_GELU),
    Kind("gpt_neox-sequential", "gptneox", {"attention_bias": True},
         lambda cfg: {**all_heads(cfg), "use_parallel_residual": False},
         [(r"query_key_value", heads_apart("num_attention_heads"))], TABLE_GELU),
    Kind("bloom", "bloom", more=lambda cfg: {**all_heads(cfg), "feed_forward_length": 384},
         rules=[(r"query_key_value", heads_apart("num_attention_heads")), TIED], bound=TABLE_GELU),
    Kind("mpt", "mpt",
         more=lambda cfg: {**all_heads(cfg), "feed_forward_length": 384, "attention.clamp_kqv": 0.5,
                           "attention.max_alibi_bias": 8.0},
         rules=[TIED], bound=TABLE_GELU),
    Kind("falcon", "falcon", more=lambda cfg: {"attention.head_count_kv": 1},
         rules=[(r"query_key_value", heads_apart("")), TIED], bound=TABLE_GELU),
    Kind("falcon-40b", "falcon", more=lambda cfg: {"attention.head_count_kv": 2},
         rules=[(r"query_key_value", heads_apart("num_kv_heads")), TIED], bound=TABLE_GELU),
    Kind("falcon-11b", "falcon", more=lambda cfg: {"attention.head_count_kv": 2},
         rules=[(r"query_key_value", heads_apart("num_kv_heads"))], bound=TABLE_GELU),
    Kind("qwen", "qwen",
         more=lambda cfg: {"attention.layer_norm_rms_epsilon": 1e-6, "attention.layer_norm_epsilon": None}),
    Kind("chatglm", "chatglm", more=lambda cfg: {"rope.dimension_count": 8}, rules=[(r"rotary_pos_emb", dropped)]),
    Kind("mamba", "mamba", {"intermediate_size": 64},
         lambda cfg: {**mamba(cfg), "ssm.inner_size": 64, "ssm.time_step_rank": 4}, [*SINGLE, TIED]),
    Kind("falcon_mamba", "mamba", {"intermediate_size": 64, "mixer_rms_eps": 1e-6, "layer_norm_epsilon": 1e-6},
         lambda cfg: {**mamba(cfg), "ssm.inner_size": 64, "ssm.time_step_rank": 4, "ssm.dt_b_c_rms": True}, [*SINGLE, TIED]),
    Kind("mamba2", "mamba2",
         more=lambda cfg: {**mamba(cfg), "ssm.inner_size": 64, "ssm.time_step_rank": 4, "ssm.group_count": 2},
         rules=[*MIXER, (r"mixer\.norm\.", in_groups("n_groups"))]),
    Kind("jamba", "jamba", more=jamba, rules=SINGLE),
    Kind("granite_hybrid", "granitehybrid", {"position_embedding_type": "nope"},
         lambda cfg: {**mamba2(cfg), **scales(cfg), **attends(cfg, "attention", "full_attention"),
                      "rope.scaling.finetuned": False, "expert_shared_feed_forward_length": 40},
         [*HYBRID_RULES, (r"shared_mlp\.input_linear", halves("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")),
          (r"input_linear", halves("mlp.experts.gate_proj", "mlp.experts.up_proj"))]),
    Kind("bamba", "granitehybrid", more=bamba, rules=HYBRID_RULES, bound=None),
    Kind("bamba", "granitehybrid",
         {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
         bamba, HYBRID_RULES, name="bamba-whole"),
    Kind("granite_hybrid-nope", "granitehybrid",
         more=lambda cfg: {**mamba2(cfg), **scales(cfg), **attends(cfg, "attention", "full_attention"),
                           "feed_forward_length": 40, "rope.scaling.finetuned": False, "expert_used_count": None},
         rules=[*HYBRID_RULES, TIED, (r"input_linear", halves("mlp.gate_proj", "mlp.up_proj")),
                (r"output_linear", renamed("shared_mlp.output_linear", "mlp.down_proj"))]),
    Kind("nemotron_h", "nemotron_h", {"hybrid_override_pattern": "M-*M", "num_hidden_layers": 4},
         lambda cfg: {**nemotron(cfg), "expert_count": None, "expert_used_count": None},
         [*MIXER, (r"mixer\.norm\.", in_groups("n_groups"))]),
    Kind("nemotron_h-latent", "nemotron_h_moe", {"mlp_bias": False}, experts_of_nemotron,
         [*MIXER, (r"mixer\.norm\.", in_groups("n_groups")), (r"mixer\.experts", experts_of_llama),
          BIAS_OF_CHOICE]),
    Kind("lfm2", "lfm2", {"block_auto_adjust_ff_dim": False},
         lambda cfg: {**attends(cfg, "full_attention"), "shortconv.l_cache": 3, "attention.layer_norm_rms_epsilon": 1e-5,
                      "attention.layer_norm_epsilon": None}, [TIED, (r"conv\.conv", squeezed)]),
    Kind("falcon_h1", "falcon-h1", {"head_dim": 16},
         lambda cfg: {"ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 4,
                      "ssm.inner_size": 64},
         [*MIXER, (r"mamba\.norm\.", in_groups("mamba_n_groups")), (r"_proj\.weight|lm_head|embed_tokens", falcon_h1)]),
    Kind("qwen3_next", "qwen3next", {"linear_value_head_dim": 16}, qwen3_next, QWEN3_NEXT_RULES),
    Kind("qwen3_next", "qwen3next", {"linear_value_head_dim": 16}, qwen3_next, QWEN3_NEXT_RULES, name="qwen3_next-joined",
         joined=True),
    Kind("glm4_moe", "glm4moe", more=routing,
         rules=[BIAS_OF_CHOICE]),
    Kind("llama4", "llama4", {"attention_chunk_size": 8192, "floor_scale": 8192},
         lambda cfg: {"feed_forward_length": 96, "expert_feed_forward_length": 48, "interleave_moe_layer_step": 2},
         [(r"experts\.gate_up_proj", columns("gate_proj", "up_proj")), (r"experts\.down_proj", columns("down_proj"))]),
    Kind("deepseek2", "deepseek2", {"attention_bias": False, **DEEPSEEK_LITE}, latent, [(r"kv_b_proj", heads_of_latents)]),
    Kind("deepseek2-groups", "deepseek2", more=latent, rules=[(r"kv_b_proj", heads_of_latents)], bound=None),
    Kind("deepseek3", "deepseek2",
         {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                              "original_max_position_embeddings": 16}},
         lambda cfg: {**latent(cfg), "expert_gating_func": 2},
         [(r"kv_b_proj", heads_of_latents), BIAS_OF_CHOICE]),
    Kind("deepseek3", "deepseek2", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
         lambda cfg: {**latent(cfg), **whole_keys(cfg), "expert_gating_func": 2}, [BIAS_OF_CHOICE], name="deepseek3-first"),
    Kind("gpt_oss", "gpt-oss", {"swiglu_limit": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
         lambda cfg: {"expert_feed_forward_length": 48},
         [(r"sinks", renamed("sinks", "sinks.weight")), (r"gate_up_proj", columns("alternating", "gate_proj", "up_proj")),
          (r"experts\.down_proj", columns("down_proj"))]),
    Kind("qwen2_moe", "qwen2moe", {"decoder_sparse_step": 1, "norm_topk_prob": False},
         lambda cfg: {"expert_shared_feed_forward_length": 40}, [(r"shared_expert_gate", squeezed)]),
    Kind("qwen2_moe", "qwen2moe", {"decoder_sparse_step": 1, "norm_topk_prob": False, "shared_expert_intermediate_size": 64,
                                   "intermediate_size": 64},
         lambda cfg: {"expert_feed_forward_length": None}, [(r"shared_expert_gate", squeezed)], name="qwen2_moe-first"),
    Kind("qwen3_moe", "qwen3moe", {"mlp_only_layers": []}),
    Kind("olmoe", "olmoe", {"clip_qkv": None, "num_key_value_heads": 4}),
    Kind("mixtral", "llama", rules=[TURNED]),
]}  # fmt: skip
