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
_STEMS_BACK = {theirs: ours for ours, theirs in _STEMS.items()} | _MIXTRAL
_NAME = re.compile(r"(?P<head>.*?)(?P<layer>(?<=\.)\d+(?=\.))?(?P<tail>[^\d]*)\.(?P<kind>weight|bias)")

# Tensors that hold no weight: the configuration reads the first, the others repeat what the metadata says.
NO_WEIGHTS = ("rope_freqs.weight", "blk.*.attn_rot_embd", "blk.*.rope_freqs.weight")


def _translate(name: str, stems: dict[str, str]) -> str | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer = match["layer"] or ""
    stem = stems.get(match["head"] + ("#" if layer else "") + match["tail"])
    return None if stem is None else f"{stem.replace('#', layer)}.{match['kind']}"


def to_hugging_face(name: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for a name that the table lacks."""
    return _translate(name, _STEMS)


def to_gguf(name: str) -> str | None:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`; None for a name that the table lacks."""
    return _translate(name, _STEMS_BACK)
