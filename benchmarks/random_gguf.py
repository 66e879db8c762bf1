"""Writes a GGUF model with random, non-zero weights: the same file for llmpy and for llama.cpp."""

from pathlib import Path

import gguf
import numpy as np

# Qwen3-0.6B's shape
SHAPE = {"hidden": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 3072, "vocab": 151936}
NAMES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
NAMES += ("iq4_nl", "iq4_xs", "iq3_xxs", "iq3_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "tq1_0", "tq2_0")
TYPES = {name: getattr(gguf.GGMLQuantizationType, name.upper()) for name in NAMES}
# Offsets of a block's float16 scales. Random bits might be infinite there, so scales get small finite values.
SCALES = {
    "q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2),
    "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
    "iq4_nl": (0,), "iq4_xs": (0,), "iq3_xxs": (0,), "iq3_s": (0,), "iq2_xxs": (0,), "iq2_xs": (0,), "iq2_s": (0,),
    "iq1_s": (0,), "tq1_0": (52,), "tq2_0": (64,),
}  # fmt: skip


def matrix_weights() -> int:
    """Number of weights that multiply every row, without the head, in Qwen3-0.6B's shape."""
    attention = 2 * (SHAPE["heads"] + SHAPE["kv_heads"]) * SHAPE["head_dim"] * SHAPE["hidden"]
    return SHAPE["layers"] * (attention + 3 * SHAPE["ffn"] * SHAPE["hidden"])


def random_tensor(rng: np.random.Generator, rows: int, cols: int, kind: str) -> np.ndarray:
    """The stored values or bytes of a random matrix, one row per row."""
    if kind in ("f32", "f16", "bf16"):
        values = rng.standard_normal((rows, cols), dtype=np.float32) * 0.02
        if kind == "bf16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values if kind == "f32" else values.astype(np.float16)
    per_block, size = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    blocks = rng.integers(0, 256, (rows, cols // per_block, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scale = rng.uniform(0.5e-3, 1e-3, (rows, cols // per_block, 1)).astype(np.float16)
        blocks[:, :, at : at + 2] = scale.view(np.uint8)
    return blocks.reshape(rows, -1)


def header(writer: gguf.GGUFWriter, shape: dict[str, int]) -> None:
    """The keys that both engines need."""
    writer.add_block_count(shape["layers"])
    writer.add_context_length(16384)
    writer.add_embedding_length(shape["hidden"])
    writer.add_feed_forward_length(shape["ffn"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(shape["vocab"])
    writer.add_tokenizer_model("no_vocab")


def write(path: Path, kind: str, seed: int = 0, shape: dict[str, int] = SHAPE, is_tied: bool = True) -> Path:
    """Writes a model of one weight type, unless the file exists. Returns its path.

    Args:
        path: The file.
        kind: The type of all matrices, one of NAMES.
        seed: Of the weights.
        shape: Sizes under SHAPE's keys. Every layer has the same matrices, so a large model is written quickly.
        is_tied: The head reads the table of embeddings; otherwise it has a matrix of its own.
    """
    if path.exists():
        return path
    rng, part = np.random.default_rng(seed), Path(f"{path}.part")
    writer = gguf.GGUFWriter(part, "qwen3")
    header(writer, shape)
    hidden, ffn = shape["hidden"], shape["ffn"]
    q, kv = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    sizes = {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q),
             "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn)}  # fmt: skip
    vectors = {"attn_norm": hidden, "ffn_norm": hidden, "attn_q_norm": shape["head_dim"], "attn_k_norm": shape["head_dim"]}
    writer.add_tensor("token_embd.weight", random_tensor(rng, shape["vocab"], hidden, kind), raw_dtype=TYPES[kind])
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    if not is_tied:
        writer.add_tensor("output.weight", random_tensor(rng, shape["vocab"], hidden, kind), raw_dtype=TYPES[kind])
    matrices = {name: random_tensor(rng, rows, cols, kind) for name, (rows, cols) in sizes.items()}
    for i in range(shape["layers"]):
        for name, matrix in matrices.items():
            writer.add_tensor(f"blk.{i}.{name}.weight", matrix, raw_dtype=TYPES[kind])
        for name, size in vectors.items():
            writer.add_tensor(f"blk.{i}.{name}.weight", (1 + 0.1 * rng.standard_normal(size)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part.rename(path)
