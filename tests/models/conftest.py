"""Tiny checkpoints with random parameters, saved by transformers or written as GGUF, and their expected results."""

import copy
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from modules import load

try:
    import gguf
except ImportError:
    gguf = None  # only what takes gguf_of needs it
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")

from llmpy import _core, models  # noqa: E402
from llmpy.engine import images  # noqa: E402
from llmpy.models.interpret import Interpreter  # noqa: E402
from llmpy.models.shard import shard, shard_by_data  # noqa: E402

BASE = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def own_class(file: str, name: str) -> type:
    """A class of a file beside this one."""
    return getattr(load(Path(__file__).with_name(f"{file}.py")), name)


def rope(kind: str, **fields: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


def by_layer(full: dict[str, object], rope_theta: float = 10000.0) -> dict[str, object]:
    sliding = {"rope_type": "default", "rope_theta": rope_theta}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


FAR = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 32}
LONGROPE = {
    "original_max_position_embeddings": 16,
    "sliding_window": None,
    **rope("longrope", partial_rotary_factor=0.75, short_factor=[1.0, 1.1, 1.2, 1.3, 1.5, 1.7],
           long_factor=[1.5, 2.0, 3.0, 4.0, 6.0, 8.0], original_max_position_embeddings=16),
}  # fmt: skip
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 3}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
GRANITE = {
    "embedding_multiplier": 2.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5, "logits_scaling": 3.0,
    "shared_intermediate_size": 40,
}  # fmt: skip
JAMBA = {
    "attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8,
}  # fmt: skip
NEMOTRON_H = {
    "n_groups": 2, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "head_dim": 24, "n_routed_experts": 4,
    "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "chunk_size": 8,
}  # fmt: skip
FALCON_H1 = {
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8,
    "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.7, "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6, "mlp_multipliers": [0.7, 1.4],
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
}  # fmt: skip
QWEN3_NEXT = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK3 = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2, "n_group": 2,
    "topk_group": 1, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "head_dim": 16,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
    "first_k_dense_replace": 1, "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2,
    "moe_intermediate_size": 24, "routed_scaling_factor": 1.5,
}  # fmt: skip
LLAMA4 = {
    "attention_chunk_size": 8, "num_local_experts": 4, "intermediate_size": 48, "intermediate_size_mlp": 96,
    "attn_temperature_tuning": False,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "hidden_act": "gelu"}),
    "llama-linear": ("Llama", rope("linear", factor=4.0)),
    "llama-dynamic": ("Llama", {**rope("dynamic", factor=2.0), "max_position_embeddings": 48}),
    "llama-llama3": (
        "Llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama-yarn": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-yarn-mscale": (
        "Llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.3, beta_fast=16.0,
             truncate=False),
    ),
    "mistral": ("Mistral", {"head_dim": 24, "sliding_window": 8}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "ministral3": (
        "Ministral3",
        {"head_dim": 24, **rope("yarn", factor=8.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=16,
                                llama_4_scaling_beta=0.5)},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", WINDOWS),
    "qwen3": ("Qwen3", {"head_dim": 24, "attention_bias": True}),
    "qwen3-window": ("Qwen3", {**WINDOWS, "head_dim": 24, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "smollm3-window": (
        "SmolLM3",
        {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 8,
         "attention_bias": True, "mlp_bias": True},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 8, "attention_bias": True, **by_layer(FAR, rope_theta=5e5)}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 2.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    ),
    "granite-bias": (
        "Granite", {"residual_multiplier": 0.22, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "phi3": ("Phi3", {"sliding_window": 8, **rope("default", partial_rotary_factor=0.75)}),
    "phi3-longrope": ("Phi3", LONGROPE),
    "gemma": ("Gemma", {"head_dim": 24, "attention_bias": True}),
    "gemma2": (
        "Gemma2",
        {"num_hidden_layers": 3, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
         "sliding_window": 8},
    ),
    "gemma3": (
        "Gemma3",
        {"num_hidden_layers": 4, "sliding_window_pattern": 3, "sliding_window": 8, "head_dim": 24, "query_pre_attn_scalar": 20,
         **by_layer({"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6})},
    ),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 24, "attention_bias": False}),
    "seed_oss": ("SeedOss", {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True}),
    "seed_oss-plain": ("SeedOss", {"head_dim": 16}),
    "exaone4": ("Exaone4", {"num_hidden_layers": 4, "sliding_window": 8}),
    "arcee": ("Arcee", {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    "stablelm": ("StableLm", {}),
    "stablelm-norms": ("StableLm", {"qk_layernorm": True}),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "nemotron": ("Nemotron", {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    "cohere": ("Cohere", {"logit_scale": 0.3, "attention_bias": True, "use_qk_norm": True}),
    "cohere-plain": ("Cohere", {}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 4, "sliding_window": 8, "logit_scale": 0.3}),
    "phi": ("Phi", {}),
    "phi-norms": ("Phi", {"qk_layernorm": True, **rope("default", partial_rotary_factor=0.25)}),
    "olmo": ("Olmo", {"clip_qkv": 0.5, "attention_bias": True}),
    "olmo-plain": ("Olmo", {}),
    "apertus": ("Apertus", {"attention_bias": True}),
    "plamo2": ("Plamo2", {"rope_local_theta": 5000.0, "full_attention_idx": [3], "rope_theta": 20000.0}),
    "plamo2-untied": ("Plamo2", {"tie_word_embeddings": False, "num_hidden_layers": 3, "mamba_step": 8}),
    "plamo3": ("Plamo3", {"num_hidden_layers": 2, "sliding_window_pattern": 2}),
    "mamba": ("Mamba", {"hidden_size": 32, "state_size": 8, "time_step_rank": 4}),
    "mamba-bias": ("Mamba", {"hidden_size": 24, "state_size": 5, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3}),
    "falcon_mamba": ("FalconMamba", {"hidden_size": 32, "state_size": 8, "time_step_rank": 4, "mixer_rms_eps": 1e-3}),
    "mamba2": ("Mamba2", {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8}),
    "mamba2-bias": (
        "Mamba2",
        {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8, "use_bias": True,
         "use_conv_bias": False, "time_step_limit": [0.1, 0.8]},
    ),
    "jamba": ("Jamba", {"num_hidden_layers": 4, **JAMBA, "num_experts": 4}),
    "jamba-plain": ("Jamba", {"num_hidden_layers": 3, **JAMBA, "num_experts": 1}),
    "bamba": ("Bamba", {"num_hidden_layers": 3, "attn_layer_indices": [1], **MAMBA2, "mamba_n_groups": 2}),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3, **MAMBA2, **GRANITE, "num_local_experts": 4,
         "intermediate_size": 48, "position_embedding_type": "rope"},
    ),
    "granite_hybrid-nope": (
        "GraniteMoeHybrid",
        {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3, **MAMBA2, **GRANITE, "num_local_experts": 0,
         "tie_word_embeddings": True},
    ),
    "qwen2_moe": ("Qwen2Moe", {"num_hidden_layers": 3, "decoder_sparse_step": 2, **EXPERTS, "norm_topk_prob": True,
                               "shared_expert_intermediate_size": 40}),
    "qwen2_moe-window": (
        "Qwen2Moe",
        {"num_hidden_layers": 3, **EXPERTS, "shared_expert_intermediate_size": 40, "use_sliding_window": True,
         "sliding_window": 8, "max_window_layers": 2, "qkv_bias": False},
    ),
    "qwen3_moe": (
        "Qwen3Moe", {"num_hidden_layers": 3, **EXPERTS, "mlp_only_layers": [1], "head_dim": 24, "norm_topk_prob": True},
    ),
    "qwen3_moe-window": ("Qwen3Moe", {**EXPERTS, "use_sliding_window": True, "sliding_window": 8, "attention_bias": True}),
    "olmoe": ("Olmoe", {**EXPERTS, "intermediate_size": 32, "clip_qkv": 1.5}),
    "olmoe-norm": ("Olmoe", {**EXPERTS, "intermediate_size": 32, "norm_topk_prob": True, "attention_bias": True}),
    "glm4_moe": ("Glm4Moe", {"num_hidden_layers": 3, **DEEPSEEK3, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe-plain": ("Glm4Moe", {**DEEPSEEK3, "norm_topk_prob": False, "n_group": 1}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 24, "use_bias": True}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"num_hidden_layers": 3, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2},
    ),
    "ernie4_5_moe-bias": (
        "Ernie4_5_Moe",
        {"num_hidden_layers": 4, "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 32, "moe_layer_interval": 2,
         "moe_num_shared_experts": 0, "use_bias": True, "moe_layer_start_index": 0, "tie_word_embeddings": False},
    ),
    "granite_moe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48, **GRANITE}),
    "llama4": ("Llama4", {"num_hidden_layers": 4, "head_dim": 16, "interleave_moe_layer_step": 2, **LLAMA4,
                          "attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.5}),
    "llama4-plain": (
        "Llama4",
        {**LLAMA4, "use_qk_norm": False, "num_experts_per_tok": 2, "no_rope_layers": [0, 1], "attention_bias": True},
    ),
    "nemotron_h": ("NemotronH", {"hybrid_override_pattern": "M-*ME", "num_hidden_layers": 5, **NEMOTRON_H}),
    "nemotron_h-latent": (
        "NemotronH",
        {"layers_block_type": ["mamba", "moe", "attention", "mamba"], "num_hidden_layers": 4, **NEMOTRON_H,
         "moe_latent_size": 32, "routed_scaling_factor": 2.5, "mlp_bias": True},
    ),
    "lfm2": ("Lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
    "lfm2-bias": (
        "Lfm2",
        {"full_attn_idxs": [1], "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False,
         "tie_word_embeddings": False},
    ),
    "falcon_h1": ("FalconH1", {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "falcon_h1-plain": ("FalconH1", {**FALCON_H1, "mlp_multipliers": None, "ssm_multipliers": None, "mamba_n_groups": 1}),
    "falcon_h1-norm": ("FalconH1", {**FALCON_H1, "mamba_rms_norm": True, "attention_bias": True, "projectors_bias": True}),
    "qwen3_next": ("Qwen3Next", {"num_hidden_layers": 4, **QWEN3_NEXT}),
    "qwen3_next-mlp": (
        "Qwen3Next",
        {"num_hidden_layers": 3, **QWEN3_NEXT, "mlp_only_layers": [0], "norm_topk_prob": False,
         "layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "intermediate_size": 48, "head_dim": 24}),
    "gpt2": ("GPT2", {"n_inner": 96}),
    "gpt2-scaled": ("GPT2", {"n_inner": 96, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}),
    "gpt_bigcode": ("GPTBigCode", {"n_inner": 96}),
    "gpt_bigcode-heads": ("GPTBigCode", {"n_inner": 96, "multi_query": False}),
    "starcoder2": ("Starcoder2", {"sliding_window": 8, "norm_epsilon": 1e-3}),
    "starcoder2-plain": ("Starcoder2", {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False}),
    "gptj": ("GPTJ", {"n_inner": 96, "rotary_dim": 8}),
    "codegen": ("CodeGen", {"n_inner": 96, "rotary_dim": 8}),
    "gpt_neox": ("GPTNeoX", rope("default", partial_rotary_factor=0.25)),
    "gpt_neox-sequential": ("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False}),
    "opt": ("OPT", {"ffn_dim": 96}),
    "opt-350m": ("OPT", {"ffn_dim": 96, "do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-plain": ("OPT", {"ffn_dim": 96, "enable_bias": False, "tie_word_embeddings": False}),
    "bloom": ("Bloom", {"hidden_size": 96, "num_attention_heads": 6}),
    "bloom-norm": ("Bloom", {"apply_residual_connection_post_layernorm": True, "tie_word_embeddings": False}),
    "mpt": ("Mpt", {"hidden_size": 96, "num_attention_heads": 6, "max_seq_len": 128, "attn_config": {"clip_qkv": 0.5}}),
    "falcon": ("Falcon", {"ffn_hidden_size": 96}),
    "falcon-40b": ("Falcon", {"ffn_hidden_size": 96, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": (
        "Falcon",
        {"ffn_hidden_size": 96, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
         "tie_word_embeddings": False},
    ),
    "falcon-rw": (
        "Falcon", {"ffn_hidden_size": 96, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    ),
    "baichuan": ("Baichuan7B", {}),
    "baichuan2": ("Baichuan2", {}),
    "baichuan-13b": ("Baichuan13B", {"hidden_size": 320, "num_attention_heads": 40}),
    "internlm2": ("InternLM2", {"attention_bias": True}),
    "internlm2-plain": ("InternLM2", {}),
    "qwen": ("Qwen1", {}),
    "chatglm": ("ChatGlm3", {"head_dim": 16, "attention_bias": True}),
    "deepseek2": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "attention_bias": True}),
    "deepseek2-groups": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    ),
    "deepseek3": (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": 24, "n_group": 2, "topk_group": 1,
         **rope("yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.3, original_max_position_embeddings=16)},
    ),
    "deepseek3-halves": (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": 24, "rope_interleave": False, "attention_bias": True, "first_k_dense_replace": 9},
    ),
    "gpt_oss": (
        "GptOss",
        {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48, "head_dim": 16,
         "sliding_window": 8, "swiglu_limit": 0.5, "layer_types": ["sliding_attention", "full_attention"] * 2,
         **rope("yarn", factor=4.0, truncate=False, original_max_position_embeddings=32)},
    ),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
}  # fmt: skip
# The default run has one case of each topology; the slow tests have all cases.
SLOW = {
    "smollm3", "smollm3-window", "olmo2", "granite", "granite-bias", "phi3", "gemma", "gemma2", "glm", "seed_oss",
    "seed_oss-plain", "exaone4", "exaone4-full", "arcee", "stablelm", "stablelm-parallel",
    "stablelm-norms", "cohere-plain", "phi-norms", "olmo-plain",
    "mamba-bias", "falcon_mamba", "mamba2-bias", "jamba-plain", "granite_hybrid", "granite_hybrid-nope", "plamo2-untied",
    "nemotron_h-latent", "qwen3_next-mlp", "lfm2-bias", "falcon_h1-plain", "falcon_h1-norm",
    "gpt2-scaled", "gpt_bigcode-heads", "starcoder2-plain", "codegen", "gpt_neox-sequential", "opt-plain", "internlm2-plain",
    "qwen", "chatglm", "bloom-norm", "falcon-11b", "baichuan", "baichuan2", "baichuan-13b", "gptj",
    "qwen2_moe-window", "qwen3_moe-window", "olmoe", "olmoe-norm", "glm4_moe-plain", "ernie4_5", "ernie4_5_moe",
    "ernie4_5_moe-bias", "granite_moe", "llama4-plain", "ministral3", "plamo3",
}  # fmt: skip
# Families that transformers lacks: a file with our own reference, and its class.
REFERENCES = {"Plamo2": own_class("plamo2_reference", "Plamo2"), "Plamo3": own_class("plamo3_reference", "Plamo3")}
RENAMED = ("InternLM2", "Qwen1", "ChatGlm3", "Baichuan7B", "Baichuan2", "Baichuan13B")
REFERENCES |= {name: own_class("renamed_reference", name) for name in RENAMED}
CLASSES = {"GPT2": "GPT2LMHeadModel"}  # names that are not the family's with "ForCausalLM"
CONFIGS = {"Llama4": "Llama4Text", "Gemma3": "Gemma3Text"}  # names of configurations that differ from the family's


def randomise(model: "torch.nn.Module", seed: int) -> None:
    """Every parameter from seeded noise: norms around 1, everything else around 0, so that none can be forgotten. Biases for
    the choice of experts, which may be buffers, are not negative: masks of groups differ between versions below that."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                noise = torch.log(1 + 7 * torch.rand(parameter.shape, generator=generator)) / 0.15
            parameter.copy_(1 + 0.2 * noise if "norm" in name else noise if "embed" in name else 0.15 * noise)
        for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.2 * torch.rand(tensor.shape, generator=generator))


class Tiny:
    """A saved tiny model and its reference."""

    def __init__(self, directory: Path, model: "torch.nn.Module") -> None:
        self.directory, self.model = directory, model
        self.models = {"float32": model}

    @property
    def config(self) -> dict[str, object]:
        return json.loads((self.directory / "config.json").read_text())

    def logits(self, ids: Sequence[int], dtype: str = "float32") -> np.ndarray:
        """Reference logits of every position, eager, without a cache; in float32 or all in another type."""
        if dtype not in self.models:
            self.models[dtype] = copy.deepcopy(self.model).to(getattr(torch, dtype))
        with torch.no_grad():
            out = self.models[dtype](torch.tensor([list(ids)]), use_cache=False)
        return out.logits[0].double().numpy()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """tiny(case, dtype="float32", shards=1, **fields) -> Tiny; each is made once."""
    made: dict[str, Tiny] = {}

    def make(case: str, dtype: str = "float32", shards: int = 1, **fields: object) -> Tiny:
        key = f"{case} {dtype} {shards} {fields}"
        if key not in made:
            family, own = CASES[case]
            if family in REFERENCES:
                directory, plain = tmp_path_factory.mktemp(case), REFERENCES[family]({**BASE, **own, **fields}, seed=len(case))
                plain.save(directory)
                made[key] = Plain(directory, plain)
                return made[key]
            config = getattr(transformers, CONFIGS.get(family, family) + "Config")(**{**BASE, **own, **fields})
            kind = getattr(transformers, CLASSES.get(family, family + "ForCausalLM"))
            model = kind(config)
            randomise(model, seed=len(case))
            model = model.to(getattr(torch, dtype))
            directory = tmp_path_factory.mktemp(case)
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            model.save_pretrained(directory, max_shard_size=size // shards + 1024)
            attention = "sdpa" if own.get("alibi") else "eager"  # eager attention would add the slopes of Falcon twice
            reference = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention)
            made[key] = Tiny(directory, reference.eval())
        return made[key]

    return make


class Plain(Tiny):
    """A tiny model that a plain NumPy reference made."""

    def logits(self, ids: Sequence[int], dtype: str = "float32") -> np.ndarray:
        return self.model.logits(ids)


class HostCheckpoint:
    """The interface of our reader over the safetensors and gguf packages, independent of our C readers."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.metadata: dict[str, object] = {}
        self._data: dict[str, tuple[str, np.ndarray]] = {}
        self._files: dict[str, str] = {}
        for path in map(str, paths):
            for name, dtype, values in read_gguf(path, self.metadata) if path.endswith("gguf") else read_shard(path):
                self._data[name], self._files[name] = (dtype, values), path

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...], str]]:
        return {
            name: (dtype, values.shape, self._files.get(name, "added")) for name, (dtype, values) in self._data.items()
        }

    def read_float32(self, name: str) -> bytes:
        return self._data[name][1].tobytes()

    def column_order(self, name: str) -> bytes:
        """No tensor has its columns sorted."""
        assert name in self._data
        return b""


def read_shard(path: str) -> Iterator[tuple[str, str, np.ndarray]]:
    with safetensors.safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            yield name, str(tensor.dtype).removeprefix("torch."), tensor.float().numpy()


def read_gguf(path: str, metadata: dict[str, object]) -> Iterator[tuple[str, str, np.ndarray]]:
    reader = gguf.GGUFReader(path)
    metadata |= {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    for tensor in reader.tensors:
        kind = tensor.tensor_type
        values = gguf.quants.dequantize(tensor.data, kind).reshape([int(n) for n in reversed(tensor.shape)])
        yield tensor.name, names.get(kind.name, kind.name.lower()), values.astype(np.float32)


def model_files(path: Path, **config: object) -> SimpleNamespace:
    """ModelFiles of a directory or a GGUF file, with changes to config.json."""
    if path.is_file():
        return SimpleNamespace(
            kind="gguf", directory=None, weights=[path], config={}, generation_config={}, name="tiny"
        )
    fields = {**json.loads((path / "config.json").read_text()), **config}
    shards = sorted(path.glob("*.safetensors"))
    return SimpleNamespace(kind="hf", directory=path, weights=shards, config=fields, generation_config={}, name="tiny")


class Oracle:
    """A model compiled by llmpy and run by the NumPy interpreter on independently read weights."""

    def __init__(self, path: Path, config: Mapping[str, object] | None = None, **options: object) -> None:
        files = model_files(path, **(config or {}))
        self.checkpoint = HostCheckpoint(files.weights)
        self.compiled = models.load(files, self.checkpoint, **options)
        self.interpreter = Interpreter(self.compiled.spec, self._read)

    def _read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.frombuffer(self.checkpoint.read_float32(name), np.float32).reshape(shape)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        return self.interpreter.logits(ids)


@pytest.fixture(scope="session")
def random_parameters() -> Callable[["torch.nn.Module", int], None]:
    return randomise


@pytest.fixture(scope="session")
def oracle() -> type[Oracle]:
    return Oracle


@pytest.fixture(scope="session")
def host_checkpoint() -> type[HostCheckpoint]:
    return HostCheckpoint


@pytest.fixture(scope="session")
def files_of() -> Callable[..., SimpleNamespace]:
    return model_files


@pytest.fixture(
    scope="session",
    params=[pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES],
)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Random token ids of the lengths 1, 7, 33 and 70."""
    random = np.random.default_rng(7)
    return [random.integers(3, 99, n).tolist() for n in (1, 7, 33, 70)]


def relative_error(have: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the largest magnitude."""
    return float(np.abs(have - want).max() / np.abs(want).max())


@pytest.fixture(scope="session")
def error_of() -> Callable[[np.ndarray, np.ndarray], float]:
    return relative_error


# Types of random blocks: where a block has its float16 scales. The package cannot write them; it writes TQ types, but ternary
# weights of the largest size give no useful model. IQ1_M's scale is spread over four words.
RANDOM_TYPES = {"Q2_K": (80, 84), "Q3_K": (108, 110), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210), "IQ1_M": (48, 56)}
RANDOM_TYPES |= dict.fromkeys(("IQ4_NL", "IQ4_XS", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S"), (0, 2))
RANDOM_TYPES |= {"TQ1_0": (52, 54), "TQ2_0": (64, 66)}


def put_scales(blocks: np.ndarray, kind: str, scales: np.ndarray) -> None:
    """Writes the float16 scales [block, scale] of a type of RANDOM_TYPES."""
    first, last = RANDOM_TYPES[kind]
    if kind != "IQ1_M":
        blocks[:, first:last] = scales.astype("<f2").view(np.uint8)
        return
    for i in range(4):  # 4 bits at the top of each word
        bits = scales[:, 0].astype("<f2").view(np.uint16) >> 4 * i & 15
        blocks[:, first + 1 + 2 * i] = blocks[:, first + 1 + 2 * i] & 15 | bits << 4


def quantised(values: np.ndarray, kind: str, random: np.random.Generator) -> np.ndarray:
    """Blocks of a type: quantised by the gguf package, or random blocks of RANDOM_TYPES."""
    dtype = gguf.GGMLQuantizationType[kind]
    if kind not in RANDOM_TYPES:
        return gguf.quants.quantize(values.astype(np.float32), dtype)
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[dtype]
    blocks = random.integers(0, 256, (values.size // n_values, n_bytes), dtype=np.uint8)
    # of both signs, and such that the weights deviate by 0.06
    scales = random.normal(0, 1, (len(blocks), 2 if kind in ("Q2_K", "Q4_K", "Q5_K") else 1))
    put_scales(blocks, kind, scales)
    put_scales(blocks, kind, scales * 0.06 / gguf.quants.dequantize(blocks, dtype).std())
    return blocks.reshape(*values.shape[:-1], -1)


def permuted(values: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of q or k reordered inside each head for interleaved rope, as files of architecture "llama" have them."""
    return values.reshape(n_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def gguf_tensors(model: "torch.nn.Module") -> Iterator[tuple[str, np.ndarray]]:
    """A model's tensors by Hugging Face names; gate and up of stacked experts are separate."""
    for name, parameter in model.state_dict().items():
        values = parameter.float().numpy()
        if name.endswith("experts.gate_up_proj"):
            half = values.shape[1] // 2
            yield name.replace("gate_up_proj", "gate_proj.weight"), np.ascontiguousarray(values[:, :half])
            yield name.replace("gate_up_proj", "up_proj.weight"), np.ascontiguousarray(values[:, half:])
        else:
            yield name + (".weight" if name.endswith("experts.down_proj") else ""), values


def write_gguf(
    source: Tiny, path: Path, kind: str, *, metadata: Mapping[str, object] | None = None, part_tensors: int = 0
) -> Path:
    """Writes a tiny model as GGUF like the usual converter, with matrices in a type; split if part_tensors is not 0."""
    cfg = source.config
    family = str(cfg["model_type"])
    arch = "llama" if family in ("mistral", "mixtral") else family.replace("_moe", "moe")
    writer, random = gguf.GGUFWriter(path, arch, split_max_tensors=part_tensors), np.random.default_rng(3)
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), cfg["num_hidden_layers"])
    heads = {"q_proj": int(cfg["num_attention_heads"]), "k_proj": int(cfg["num_key_value_heads"])}
    writer.add_block_count(cfg["num_hidden_layers"])
    writer.add_context_length(cfg["max_position_embeddings"])
    writer.add_embedding_length(cfg["hidden_size"])
    writer.add_feed_forward_length(cfg["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_layer_norm_rms_eps(cfg["rms_norm_eps"])
    writer.add_rope_freq_base(cfg["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(cfg["vocab_size"])
    if "head_dim" in cfg:
        writer.add_key_length(cfg["head_dim"])
        writer.add_value_length(cfg["head_dim"])
        writer.add_rope_dimension_count(cfg["head_dim"])
    if family == "mistral" and cfg["sliding_window"]:
        writer.add_sliding_window(cfg["sliding_window"])
    n_experts = cfg.get("num_local_experts") or cfg.get("num_experts")
    if n_experts:
        writer.add_expert_count(n_experts)
        writer.add_expert_used_count(cfg["num_experts_per_tok"])
    if "moe_intermediate_size" in cfg:
        writer.add_expert_feed_forward_length(cfg["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in cfg:
        writer.add_expert_shared_feed_forward_length(cfg["shared_expert_intermediate_size"])
    for key, value in (metadata or {}).items():
        {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)](key, value)
    for name, values in gguf_tensors(source.model):
        if name == "lm_head.weight" and cfg["tie_word_embeddings"]:
            continue
        projection, place = name.split(".")[-2], names.get_name(name, try_suffixes=(".weight", ".bias"))
        if arch == "llama" and projection in heads:
            values = permuted(values, heads[projection])
        if values.ndim > 1 and min(values.shape) > 1:
            writer.add_tensor(place, quantised(values, kind, random), raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(place, values)
    if cfg["rope_parameters"]["rope_type"] == "llama3":
        plain = 1 / 10000.0 ** (np.arange(0, 16, 2) / 16)
        writer.add_tensor(
            "rope_freqs.weight", (plain / source.model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def gguf_of() -> Callable[..., Path]:
    pytest.importorskip("gguf")
    return write_gguf


@pytest.fixture()
def load_module(tmp_path: Path) -> Callable[[str], object]:
    """Imports Python text as a user's own file."""

    def load_text(text: str) -> object:
        path = tmp_path / "users_own_file.py"
        path.write_text(text)
        return load(path)

    return load_text


class Engine:
    """The real engine on a model, straight over the C core: token ids in, ids and logprobs out."""

    def __init__(
        self,
        core_options: Callable[[str], dict[str, str]],
        device: str,
        path: Path,
        *,
        config: Mapping[str, object] | None = None,
        n_ranks: int = 1,
        replicate_bytes: int | None = None,
        experts: str = "rank",
        enable_prefix_caching: bool = False,
        **options: object,
    ) -> None:
        files = model_files(path, **(config or {}))
        self.checkpoint = _core.Checkpoint([str(shard) for shard in files.weights])
        length = int(options.pop("max_model_len", 128))
        compiled = models.load(files, self.checkpoint, max_model_len=length)
        self.vocab_size = compiled.config.vocab_size
        self.has_axes = images.has_axes(compiled.spec)
        settings = {
            **core_options(device),
            **{"num_threads": 2, "dtype": "auto", "kv_dtype": "float32"},
            **{"activation_dtype": "float", "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 512},
            **{"max_model_len": length, "kv_cache_bytes": 1 << 26, "dummy_seed": None, "dummy_mxfp4": False},
            **{"fit_model_len": False, "encoder": (256, 256)},
        }
        programs = (
            shard_by_data(compiled.spec, n_ranks)
            if experts == "data"
            else shard(compiled.spec, n_ranks, replicate_bytes, experts)
        )
        self.model = _core.Model(programs, self.checkpoint, {**settings, **options})
        rules = {
            **{"max_logprobs": 128, "enable_prefix_caching": enable_prefix_caching, "policy": "fcfs", "eos_token_ids": []},
            **{"token_bytes": None, "special_token_ids": [], "vocab_limit": self.vocab_size, "banned_token_ids": []},
        }
        self.engine = _core.Engine(self.model, rules)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.model.close()

    def run(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 16, top: int | None = 0,
        placed: Sequence[Sequence[object]] = (),
    ) -> list["Answer"]:  # fmt: skip
        """Greedy answers of one batch, with the logprobs of the prompt (of `top` ids each) and of the output.

        top: None: no logprobs of the prompt, which need every row.
        placed: the images of each prompt; (): no prompt has one.
        """
        params = {"temperature": 0.0, "max_tokens": max_tokens, "seed": 0, "logprobs": 0}
        params |= {} if top is None else {"prompt_logprobs": top}
        every = [images.core_params(each, len(p), self.has_axes) if each else {} for p, each in
                 zip(prompts, placed or [()] * len(prompts), strict=True)]  # fmt: skip
        numbers = [
            self.engine.submit(np.asarray(p, np.int32).tobytes(), params | own)
            for p, own in zip(prompts, every, strict=True)
        ]
        answers = {number: Answer() for number in numbers}
        while self.engine.has_unfinished():
            self.engine.run(1000)
            for output in self.engine.take(False):
                answers[output["request"]].add(output, top or 0)
        return [answers[number] for number in numbers]


class Answer:
    """The output of one request so far."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.prompt = self.prompt_ids = self.prompt_top = np.zeros(0, np.float32)
        self.n_cached = 0

    def add(self, output: Mapping[str, object], top: int) -> None:
        assert output["status"] == 0 and output["finish"] in (None, "length")
        self.ids += np.frombuffer(output["ids"], np.int32).tolist()
        self.n_cached = output["num_cached_tokens"]
        self.logprobs += np.frombuffer(output["logprobs"][0], np.float32).tolist() if output["logprobs"] else []
        if output["prompt_logprobs"]:
            self.prompt = np.frombuffer(output["prompt_logprobs"][0], np.float32)
        if output["prompt_top"] and top:
            self.prompt_ids = np.frombuffer(output["prompt_top"][0], np.int32).reshape(-1, top)
            self.prompt_top = np.frombuffer(output["prompt_top"][1], np.float32).reshape(-1, top)

    def table(self, vocab_size: int) -> np.ndarray:
        """Logprobs of all ids at every prompt position but the last, [n - 1, vocab_size], if all were asked for."""
        table = np.full((len(self.prompt_ids), vocab_size), np.nan)
        np.put_along_axis(table, self.prompt_ids.astype(np.int64), self.prompt_top.astype(np.float64), 1)
        return table


@pytest.fixture(scope="session")
def open_engine(core_options: Callable[[str], dict[str, str]]) -> Callable[..., Engine]:
    """open_engine(device, path, ...)."""
    return functools.partial(Engine, core_options)


@pytest.fixture(scope="session")
def engine(device: str, open_engine: Callable[..., Engine]) -> Callable[..., Engine]:
    """engine(path, ...) on each device."""
    return functools.partial(open_engine, device)
