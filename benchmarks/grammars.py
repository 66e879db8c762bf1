"""The cost of structured outputs for a step: all requests with a JSON schema, simple or heavy, compared with no schema.

    python benchmarks/grammars.py [--device cuda:0] [--rows 1,8,32] [--tokens 200] [--vocab 128000] [--repeats 3]

The model has the shape of Qwen3-0.6B (a tiny one on the CPU) and random weights; its tokenizer has all bytes, random
words of 2 to 10 letters and JSON's punctuation. Prints medians of the runs: milliseconds a step, the engine's host time in a
step, and the threads' time for one mask.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from llmpy import LLM, SamplingParams
from llmpy.text.token_texts import byte_characters

TEXT = {"type": "string"}
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


def endless(item: object) -> dict[str, object]:
    """A list of objects without an end."""
    return {"type": "array", "minItems": 100000, "items": item}


SCHEMAS = {
    "free": None,
    "simple": endless({"type": "object", "properties": {"name": TEXT}, "required": ["name"], "additionalProperties": False}),
    "heavy": endless(ITEM),
}


def write(folder: Path, vocab: int, is_tiny: bool) -> None:
    """A config, and a tokenizer whose vocabulary has the size and the kinds of tokens of a real one."""
    rng = random.Random(7)
    marks = ['{"', '":', '":"', '","', '"},', "[]", '["', '"]', "},{"]
    words = {word: i for i, word in enumerate([*byte_characters(), *marks])}
    while len(words) < vocab:
        letters = "".join(rng.choices("etaoinshrdlucmfwypvbgkqjxz", k=rng.randint(2, 10)))
        words.setdefault(rng.choice(("", "Ġ", rng.choice(marks))) + letters, len(words))
    backend = Tokenizer(models.BPE(vocab=words, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    sizes = (2, 128, 4, 2, 256, 32) if is_tiny else (28, 1024, 16, 8, 3072, 128)
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim")
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": vocab, "tie_word_embeddings": True,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e6,
        "torch_dtype": "float32" if is_tiny else "bfloat16", "eos_token_id": 1, **dict(zip(names, sizes, strict=True)),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def run(llm: LLM, rows: int, tokens: int, schema: object) -> tuple[float, float, float]:
    """Milliseconds a step, the host's microseconds a step, the threads' microseconds a mask."""
    structured = None if schema is None else {"json": schema}
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, structured_outputs=structured)
    before = llm.stats()
    outputs = llm.generate([[i + 5, 6, 7] for i in range(rows)], params, use_tqdm=False)
    after = llm.stats()
    assert all(len(output.token_ids) == tokens for output in outputs)
    steps = llm.step_log(tokens // 2)  # the last half, when all requests run
    between = [later.start - step.start for step, later in pairwise(steps)]
    masks = after.num_masks - before.num_masks
    mask_us = (after.mask_us - before.mask_us) / masks if masks else 0.0
    return statistics.median(between) * 1e3, statistics.median(step.host_us for step in steps), mask_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--vocab", type=int, default=128000)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), given.vocab, given.device == "cpu")
        cache = "256MiB" if given.device == "cpu" else "16GiB"
        with LLM(name, device=given.device, load_format="dummy", kv_cache_memory_bytes=cache, max_model_len=2048) as llm:
            print(f"{llm!r}\n rows            ms/step   host us   us/mask")
            for rows in map(int, given.rows.split(",")):
                runs: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in SCHEMAS}
                for repeat in range(given.repeats + 1):  # the first warms up
                    for kind, schema in SCHEMAS.items():
                        result = run(llm, rows, given.tokens, schema)
                        runs[kind] += [result] if repeat else []
                for kind, found in runs.items():
                    step, host, mask = (statistics.median(column) for column in zip(*found, strict=True))
                    print(f"{rows:5} {kind:10} {step:8.3f} {host:9.1f} {mask:9.1f}")


if __name__ == "__main__":
    main()
