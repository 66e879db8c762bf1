"""GGUF files of dense families."""

from collections.abc import Callable

from .family import Family, Fields, Names, given, has, has_head_bias, layer_types, or_else, score_scale
from .metadata import Metadata

WINDOWS: Fields = {"layer_types": layer_types}
SANDWICH: Names = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
PLAMO3: Names = {
    "pre_mixer_norm": "attn_norm",
    "post_mixer_norm.weight": "post_attention_norm",
    "pre_mlp_norm": "ffn_norm",
    "post_mlp_norm.weight": "post_ffw_norm",
    "mixer.qkv_proj": "attn_qkv",
    "mixer.q_norm": "attn_q_norm",
    "mixer.k_norm": "attn_k_norm",
    "mixer.o_proj": "attn_output",
    "mlp.gate_up_proj": "ffn_up",
}
GRANITE: Fields = {
    "embedding_multiplier": or_else("embedding_scale", 1.0),
    "residual_multiplier": or_else("residual_scale", 1.0),
    "attention_multiplier": score_scale,
    "logits_scaling": or_else("logit_scale", 1.0),
}
MINICPM: Fields = {  # defaults for the first files (MiniCPM 1B and 2B), which lack these keys
    "embedding_multiplier": or_else("embedding_scale", 12.0),
    "residual_multiplier": lambda meta: meta.raw("residual_scale") or 1.4 / max(meta.n_layers, 1) ** 0.5,
    "logits_scaling": lambda meta: meta.raw("logit_scale") or meta.need("embedding_length", int) / 256,
}


def is_parallel(meta: Metadata) -> bool:
    """Whether StableLM's branches are parallel. Some files set the key although the configuration did not, so this also
    requires that there is no second norm."""
    return bool(meta.raw("use_parallel_residual")) and not meta.has("blk.#.ffn_norm.weight")


def gemma_scalar(layers: int) -> Callable[[Metadata], float]:
    """query_pre_attn_scalar: the size of a head; in the largest model (`layers` layers) hidden size / number of heads."""

    def scalar(meta: Metadata) -> float:
        if meta.n_layers == layers:
            return meta.need("embedding_length", int) / meta.need("attention.head_count", int)
        return float(meta.need("attention.key_length", int))

    return scalar


TABLES = (
    Family(name="llama", architecture="MixtralForCausalLM", when=given("expert_count"), interleaved=True,
           names={"block_sparse_moe.gate": "ffn_gate_inp"}),
    Family(name="llama", architecture="MistralForCausalLM", when=given("attention.sliding_window"), interleaved=True),
    Family(name="llama", architecture="LlamaForCausalLM", interleaved=True),
    Family(name="internlm2", architecture="LlamaForCausalLM", interleaved=True),
    Family(name="qwen2", architecture="Qwen2ForCausalLM"),
    Family(name="qwen3", architecture="Qwen3ForCausalLM"),
    Family(name="smollm3", architecture="SmolLM3ForCausalLM", interleaved=True),
    Family(name="arcee", architecture="ArceeForCausalLM", interleaved=True),
    Family(name="seed_oss", architecture="SeedOssForCausalLM", names={"post_attention_layernorm": "post_attention_norm"},
           fields={"attention_out_bias": has("blk.#.attn_output.bias")}),
    Family(name="olmo", architecture="OlmoForCausalLM", interleaved=True, fields={"clip_qkv": "attention.clamp_kqv"}),
    Family(name="olmo2", architecture="Olmo3ForCausalLM", when=given("attention.sliding_window"), names=SANDWICH,
           fields={**WINDOWS, "rope_theta": lambda meta: meta.raw("rope.freq_base_swa") or meta.raw("rope.freq_base")},
           rope={"attention_factor": None}),  # YaRN's default; some files store a factor on that default
    Family(name="olmo2", architecture="Olmo2ForCausalLM", names=SANDWICH),
    Family(name="exaone4", architecture="Exaone4ForCausalLM", names=SANDWICH, fields=WINDOWS),
    Family(name="granite", architecture="GraniteForCausalLM", interleaved=True, fields=GRANITE),
    Family(name="minicpm", architecture="GraniteForCausalLM", interleaved=True, fields={**GRANITE, **MINICPM}),
    Family(name="gemma", architecture="GemmaForCausalLM", has_offsets=True),
    Family(name="gemma2", architecture="Gemma2ForCausalLM", names=SANDWICH, has_offsets=True,
           fields={**WINDOWS, "query_pre_attn_scalar": gemma_scalar(46),
                   "sliding_window": or_else("attention.sliding_window", 4096),
                   "attn_logit_softcapping": or_else("attn_logit_softcapping", 50.0),
                   "final_logit_softcapping": or_else("final_logit_softcapping", 30.0)}),
    Family(name="gemma3", architecture="Gemma3ForCausalLM", names=SANDWICH, has_offsets=True,
           fields={**WINDOWS, "query_pre_attn_scalar": gemma_scalar(62),
                   "final_logit_softcapping": "final_logit_softcapping",
                   "rope_local_base_freq": or_else("rope.freq_base_swa", 10000.0)}),
    Family(name="phi2", architecture="PhiForCausalLM", outer={"model.final_layernorm": "output_norm"},
           names={"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}),
    Family(name="phi3", architecture="Phi3ForCausalLM",
           names={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
           fields={"original_max_position_embeddings": "rope.scaling.original_context_length"}),
    Family(name="command-r", architecture="CohereForCausalLM",
           fields={"logit_scale": "logit_scale", "use_qk_norm": has("blk.#.attn_q_norm.weight")}),
    Family(name="cohere2", architecture="Cohere2ForCausalLM", fields={**WINDOWS, "logit_scale": "logit_scale"}),
    Family(name="glm4", architecture="Glm4ForCausalLM",
           names={"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
                  "mlp.gate_up_proj": "ffn_up"}),
    Family(name="nemotron", architecture="NemotronForCausalLM", has_offsets=True),
    Family(name="stablelm", architecture="StableLmForCausalLM",
           names={"self_attn.q_layernorm.norms": "attn_q_norm", "self_attn.k_layernorm.norms": "attn_k_norm"},
           fields={"use_parallel_residual": is_parallel,
                   "use_qkv_bias": has_head_bias, "qk_layernorm": has("blk.#.attn_q_norm.weight")}),
    Family(name="apertus", architecture="ApertusForCausalLM",
           names={"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
           metadata={f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}),
    Family(name="ernie4_5", architecture="Ernie4_5ForCausalLM", fields={"use_bias": has_head_bias}),
    Family(name="plamo3", architecture="Plamo3ForCausalLM", has_offsets=True, layers="model.layers.layers.#.", names=PLAMO3,
           fields={**WINDOWS, "rope_local_theta": or_else("rope.freq_base_swa", 10000.0)}, rope={"truncate": False}),
)  # fmt: skip
