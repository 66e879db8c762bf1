"""Tensor names of GGUF files and of Hugging Face checkpoints, one table for both directions."""

import re

# GGUF stem -> Hugging Face stem; "#" stands for the layer's number. ".weight" and ".bias" follow either.
_STEMS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.#.attn_norm": "model.layers.#.input_layernorm",
    "blk.#.attn_q": "model.layers.#.self_attn.q_proj",
    "blk.#.attn_k": "model.layers.#.self_attn.k_proj",
    "blk.#.attn_v": "model.layers.#.self_attn.v_proj",
    "blk.#.attn_output": "model.layers.#.self_attn.o_proj",
    "blk.#.attn_q_norm": "model.layers.#.self_attn.q_norm",
    "blk.#.attn_k_norm": "model.layers.#.self_attn.k_norm",
    "blk.#.ffn_norm": "model.layers.#.post_attention_layernorm",
    "blk.#.ffn_gate": "model.layers.#.mlp.gate_proj",
    "blk.#.ffn_up": "model.layers.#.mlp.up_proj",
    "blk.#.ffn_down": "model.layers.#.mlp.down_proj",
    "blk.#.ffn_gate_inp": "model.layers.#.mlp.gate",
    "blk.#.ffn_gate_exps": "model.layers.#.mlp.experts.gate_proj",
    "blk.#.ffn_up_exps": "model.layers.#.mlp.experts.up_proj",
    "blk.#.ffn_down_exps": "model.layers.#.mlp.experts.down_proj",
    "blk.#.ffn_gate_inp_shexp": "model.layers.#.mlp.shared_expert_gate",
    "blk.#.ffn_gate_shexp": "model.layers.#.mlp.shared_expert.gate_proj",
    "blk.#.ffn_up_shexp": "model.layers.#.mlp.shared_expert.up_proj",
    "blk.#.ffn_down_shexp": "model.layers.#.mlp.shared_expert.down_proj",
}
# Mixtral's names of the same.
_MIXTRAL = {"model.layers.#.block_sparse_moe.gate": "blk.#.ffn_gate_inp"}
# Those of older families: what the layers' names begin with, and what the rest of them is in GGUF.
_OLDER = {
    "transformer.": {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "norm_f": "output_norm",
                     "word_embeddings": "token_embd", "word_embeddings_layernorm": "token_embd_norm"},
    "transformer.h.#.": {
        "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down", "mlp.w1": "ffn_up", "mlp.w2": "ffn_gate", "input_layernorm": "attn_norm",
        "ln_mlp": "attn_norm", "ln_attn": "attn_norm_2", "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    "transformer.blocks.#.": {
        "norm_1": "attn_norm", "attn.Wqkv": "attn_qkv", "attn.out_proj": "attn_output", "norm_2": "ffn_norm",
        "ffn.up_proj": "ffn_up", "ffn.down_proj": "ffn_down",
    },
    "gpt_neox.": {"embed_in": "token_embd", "final_layer_norm": "output_norm"},
    "gpt_neox.layers.#.": {
        "input_layernorm": "attn_norm", "attention.query_key_value": "attn_qkv", "attention.dense": "attn_output",
        "post_attention_layernorm": "ffn_norm", "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
    },
    "model.layers.#.": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    "transformer.embedding.": {"word_embeddings": "token_embd"},
    "transformer.encoder.": {"final_layernorm": "output_norm"},
    "transformer.encoder.layers.#.": {
        "input_layernorm": "attn_norm", "self_attention.query_key_value": "attn_qkv", "self_attention.dense": "attn_output",
        "post_attention_layernorm": "ffn_norm", "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
    },
}  # fmt: skip
_STEMS_BACK = {theirs: ours for ours, theirs in _STEMS.items()} | _MIXTRAL
_STEMS_BACK |= {"embed_out": "output", "transformer.output_layer": "output"}
_STEMS_BACK |= {
    head + tail: f"blk.#.{stem}" if "#" in head else stem for head, tails in _OLDER.items() for tail, stem in tails.items()
}
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")

# Tensors that hold no weight: the configuration reads the first, the others repeat what the metadata says.
NO_WEIGHTS = ("rope_freqs.weight", "blk.*.attn_rot_embd", "blk.*.rope_freqs.weight")


def _translate(name: str, stems: dict[str, str]) -> str | None:
    whole, _, kind = name.rpartition(".")
    layer = _LAYER.search(f"{whole}.")
    stem = stems.get(_LAYER.sub("#", f"{whole}.", count=1).removesuffix("."))
    if stem is None or kind not in ("weight", "bias"):
        return None
    return f"{stem.replace('#', layer[0] if layer else '')}.{kind}"


def to_hugging_face(name: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for a name that the table lacks."""
    return _translate(name, _STEMS)


def to_gguf(name: str) -> str | None:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`; None for a name that the table lacks."""
    return _translate(name, _STEMS_BACK)
