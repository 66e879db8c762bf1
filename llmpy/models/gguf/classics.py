"""GGUF files of older families."""

from .family import Family, has, has_head_bias, or_else
from .metadata import Metadata

GPT2 = {
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}  # fmt: skip
PACKED = {
    "self_attention.query_key_value": "attn_qkv", "self_attention.dense": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
}  # fmt: skip
TRANSFORMER = {"transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm"}
BLOOM = {"transformer.word_embeddings": "token_embd", "transformer.word_embeddings_layernorm": "token_embd_norm",
         "transformer.ln_f": "output_norm"}  # fmt: skip


def attn_config(meta: Metadata) -> dict[str, object]:
    """MPT's clip limit and ALiBi bias limit."""
    return {"clip_qkv": meta.raw("attention.clamp_kqv"), "alibi_bias_max": meta.raw("attention.max_alibi_bias")}


TABLES = (
    Family(name="baichuan", architecture="BaichuanForCausalLM", interleaved=True,
           names={"self_attn.W_pack": ("attn_q", "attn_k", "attn_v")}),
    Family(name="gpt2", architecture="GPT2LMHeadModel", layers="transformer.h.#.", names=GPT2, outer=TRANSFORMER),
    Family(name="starcoder", architecture="GPTBigCodeForCausalLM", layers="transformer.h.#.", names=GPT2, outer=TRANSFORMER),
    Family(name="starcoder2", architecture="Starcoder2ForCausalLM", names={"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
           fields={"use_bias": has_head_bias}),
    Family(name="gptneox", architecture="GPTNeoXForCausalLM", layers="gpt_neox.layers.#.",
           names={**PACKED, "attention.query_key_value": "attn_qkv", "attention.dense": "attn_output"},
           outer={"gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm", "embed_out": "output"},
           fields={"use_parallel_residual": or_else("use_parallel_residual", True),
                   "attention_bias": has("blk.#.attn_qkv.bias")}),
    Family(name="qwen", architecture="QWenLMHeadModel", layers="transformer.h.#.", outer=TRANSFORMER,
           names={**GPT2, "mlp.w1": "ffn_up", "mlp.w2": "ffn_gate"}),
    Family(name="chatglm", architecture="GlmForCausalLM", when=has("blk.#.attn_q.weight"),
           names={"mlp.gate_up_proj": "ffn_up"}),
    Family(name="chatglm", architecture="ChatGLMModel", layers="transformer.encoder.layers.#.", names=PACKED,
           outer={"transformer.embedding.word_embeddings": "token_embd", "transformer.output_layer": "output",
                  "transformer.encoder.final_layernorm": "output_norm"},
           fields={"add_qkv_bias": has("blk.#.attn_qkv.bias"),
                   "rope_ratio": lambda meta: meta.get("rope.freq_base", float, 10000.0) / 10000.0}),
    Family(name="bloom", architecture="BloomForCausalLM", layers="transformer.h.#.", names=PACKED, outer=BLOOM),
    Family(name="mpt", architecture="MptForCausalLM", layers="transformer.blocks.#.",
           names={"norm_1": "attn_norm", "attn.Wqkv": "attn_qkv", "attn.out_proj": "attn_output", "norm_2": "ffn_norm",
                  "ffn.up_proj": "ffn_up", "ffn.down_proj": "ffn_down"},
           outer={"transformer.wte": "token_embd", "transformer.norm_f": "output_norm"}, fields={"attn_config": attn_config}),
    Family(name="falcon", architecture="FalconForCausalLM", layers="transformer.h.#.", outer=BLOOM,
           names={**PACKED, "ln_mlp": "attn_norm", "ln_attn": "attn_norm_2"},
           fields={"new_decoder_architecture": lambda meta: meta.get("attention.head_count_kv", int, 1) > 1,
                   "num_kv_heads": or_else("attention.head_count_kv", 1),
                   "num_ln_in_parallel_attn": lambda meta: 1 + meta.has("blk.#.attn_norm_2.weight")}),
)  # fmt: skip
