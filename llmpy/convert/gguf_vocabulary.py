"""The vocabulary of a Hugging Face directory as metadata of a GGUF file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError
from ..text.gguf_pre_tokenizers import KINDS
from ..text.gguf_tokenizer import from_metadata
from ..text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from ..hub import ModelFiles
    from ..text.tokenizer import Tokenizer

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens in GGUF files."""
FIRST = ("llama-bpe", "qwen2", "smollm", "gpt-2", "tekken", "default")
"""Kinds of pre-tokenizers that are tried first, so that of two with the same ids the usual name is written."""
PROBES = (
    "Hello world, it's 7:40 o'clock; they'LL pay $12345.67 for 3 x 1,000,000!",
    "  two  spaces\tand\n\n\nlines\r\n end  ",
    "def f(x):\n    return x['key'] != -1  # done\n",
    "CamelCase HTTPServer snake_case kebab-case iPhone15 http://example.org/a?b=c&d=%20",
    "über Straße naïve café Ⅷ ½ Здравствуй мир 2026 مرحبا ١٢٣",
    "中文字符 日本語のテスト 한국어",
    "😀👍🏽 ...?! ~~ (a) [b] {c} <d>",
    "'s 'S 're I'm I'M don't",
    "a" * 40 + " " + "1" * 11,
    "\n",
    " ",
)
"""Texts whose ids must be the same."""


def metadata_of(files: ModelFiles, n_tokens: int, architecture: str) -> dict[str, object]:
    """The keys below `tokenizer.`.

    Args:
        files: A directory of a model.
        n_tokens: Rows of the table of embeddings; tokens that the tokenizer lacks are unused ones.
        architecture: general.architecture.

    Raises:
        UnsupportedError: the tokenizer is no byte-level BPE, or no kind of pre-tokenizer gives its ids.
    """
    assert files.directory is not None
    if not (files.directory / "tokenizer.json").is_file():
        return {"tokenizer.ggml.model": "no_vocab"}
    tokenizer = load_tokenizer(files)
    stored = json.loads(tokenizer.backend.to_str())
    if stored["model"].get("type") != "BPE" or "ByteLevel" not in json.dumps(stored.get("decoder")):
        raise UnsupportedError(
            f"{files.directory}/tokenizer.json: wanted byte-level BPE, have {stored['model'].get('type')}; convert the model "
            "with llama.cpp's convert_hf_to_gguf.py"
        )
    values = _vocabulary(tokenizer, stored, n_tokens)
    own = ("qwen2",) if architecture.startswith("qwen") else ()
    for kind in dict.fromkeys((*own, *FIRST, *KINDS)):
        values["tokenizer.ggml.pre"] = kind
        made = from_metadata(values, "convert")
        if all(list(made.encode(text)) == list(tokenizer.encode(text)) for text in PROBES):
            return values
    raise UnsupportedError(
        f"{files.directory}/tokenizer.json: no kind of pre-tokenizer of GGUF gives its ids; convert the model with llama.cpp's "
        "convert_hf_to_gguf.py"
    )


def _vocabulary(tokenizer: Tokenizer, stored: dict[str, Any], n_tokens: int) -> dict[str, object]:
    """All keys but the kind of pre-tokenizer."""
    ids: dict[str, int] = tokenizer.backend.get_vocab(with_added_tokens=True)
    tokens, types = [f"[PAD{i}]" for i in range(n_tokens)], [UNUSED] * n_tokens
    added = tokenizer.backend.get_added_tokens_decoder()
    for token, place in ids.items():
        if place < n_tokens:
            flags = added.get(place)
            tokens[place] = token
            types[place] = NORMAL if flags is None else CONTROL if flags.special else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"]["merges"]]
    values: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }  # fmt: skip
    places = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "padding": tokenizer.pad_token_id}
    ends = [place for place in tokenizer.eos_token_ids if place != places["eos"]]
    places |= zip(("eot", "eom"), ends, strict=False)
    values |= {f"tokenizer.ggml.{role}_token_id": place for role, place in places.items() if place is not None}
    whole = list(tokenizer.encode("a"))
    values["tokenizer.ggml.add_bos_token"] = whole[:1] == [places["bos"]]
    values["tokenizer.ggml.add_eos_token"] = whole[-1:] == [places["eos"]]
    for name, text in tokenizer.chat_templates.items():
        values["tokenizer.chat_template" + ("" if name == "default" else f".{name}")] = str(text)
    return values
