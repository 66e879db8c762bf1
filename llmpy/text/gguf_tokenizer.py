"""The tokenizer in a GGUF file's metadata: byte-level BPE ("gpt2"), SentencePiece-style ("llama") and PLaMo's vocabularies."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..errors import CheckpointError, UnsupportedError
from ..json_files import damaged
from .gguf_pre_tokenizers import KINDS, regex
from .token_texts import SPACE_MARK, TokenTexts, byte_characters, byte_fallback, byte_level_text
from .tokenizer import DEFAULT_TEMPLATE, Backend, TemplateText, Tokenizer

if TYPE_CHECKING:
    import tokenizers

logger = logging.getLogger("llmpy")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPECIAL = frozenset({CONTROL, UNKNOWN})
CUT_OUT = frozenset({CONTROL, UNKNOWN, USER_DEFINED})
END_TEXTS = frozenset(
    {
        *(
            "</s>",
            "<|endoftext|>",
            "<|end_of_text|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|im_end|>",
            "<|end|>",
            "<end_of_turn>",
        ),
        *("<EOT>", "_<EOT>", "<\uff5cend▁of▁sentence\uff5c>", "<end_of_utterance>"),
    }
)
ROLES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",
}


class _Vocabulary:
    """The checked vocabulary of a file."""

    def __init__(self, metadata: Mapping[str, Any], file: str) -> None:
        self.metadata = metadata
        self.file = file
        tokens = self.array("tokens", str)
        self.tokens = [token or f"[EMPTY_{place}]" for place, token in enumerate(tokens)]
        if not self.tokens:
            raise self.error("tokens", "is empty")
        if len(set(self.tokens)) != len(self.tokens):
            seen: set[str] = set()
            twice = next(token for token in self.tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
            raise self.error("tokens", f"holds {twice!r} twice")
        types = self.array("token_type", int) if "tokenizer.ggml.token_type" in metadata else [NORMAL] * len(tokens)
        if len(types) < len(self.tokens):
            raise self.error("token_type", f"wanted {len(self.tokens)} entries, have {len(types)}")
        # Tokens that end a turn are control tokens, even if the converter did not mark them.
        self.types = [CONTROL if token in END_TEXTS else kind for token, kind in zip(self.tokens, types, strict=False)]

    def error(self, key: str, problem: str) -> CheckpointError:
        """The error for a key."""
        return CheckpointError(f"{self.file}: tokenizer.ggml.{key} {problem}", file=self.file)

    def array(self, key: str, *kinds: type) -> list[Any]:
        """A list of values of the given types."""
        found = self.metadata.get(f"tokenizer.ggml.{key}")
        if found is None:
            raise self.error(key, "is missing")
        if not isinstance(found, list) or not set(map(type, found)) <= set(kinds):
            raise self.error(key, f"wanted an array of {kinds[0].__name__}")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        return bool(self.metadata.get(f"tokenizer.ggml.{key}", default))

    def id_of(self, role: str, default: int | None = None) -> int | None:
        """Id of a special token; None if it is absent or outside the vocabulary."""
        found = self.metadata.get(f"tokenizer.ggml.{role}_token_id", default)
        return found if isinstance(found, int) and 0 <= found < len(self.tokens) else None

    def added_id(self, role: str, wanted: bool, default: int | None = None) -> int | None:
        """Id of BOS or EOS if texts get it, else None."""
        if not wanted:
            return None
        found = self.id_of(role, default)
        if found is None:
            raise self.error(f"{role}_token_id", f"is missing though add_{role}_token is true")
        return found

    def ids_of(self, types: frozenset[int]) -> list[int]:
        """Ids of the tokens of the given types."""
        return [place for place, kind in enumerate(self.types) if kind in types]


def from_metadata(metadata: Mapping[str, Any], file: str) -> Tokenizer:
    """Makes the tokenizer of a GGUF file.

    Args:
        metadata: The file's key-values.
        file: Name of the file, for messages.

    Returns:
        The tokenizer; its ids equal those of llama.cpp for the same file.

    Raises:
        CheckpointError: Keys are missing or contradict each other.
        UnsupportedError: The kind of vocabulary or pre-tokenizer is unknown.
    """
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str):
        problem = "is missing" if model is None else f"wanted a name, have {repr(model)[:80]}"
        raise damaged(file, f"tokenizer.ggml.model {problem}; pass ids with skip_tokenizer_init=True")
    kinds = {"gpt2": _byte_level, "llama": _sentencepiece, "plamo2": _plamo}
    if model not in kinds:
        known = ", ".join(map(repr, kinds))
        raise UnsupportedError(f"{file}: tokenizer.ggml.model is {model!r}; supported are {known}")
    vocabulary = _Vocabulary(metadata, file)
    backend, texts, defaults = kinds[model](vocabulary)
    places = {name: vocabulary.id_of(role, defaults.get(role)) for role, name in ROLES.items()}
    named = {name: vocabulary.tokens[place] for name, place in places.items() if place is not None}
    ends = _end_ids(vocabulary, places["eos_token"])
    return Tokenizer(backend, texts, texts.special, named, ends, _templates(metadata, file))


def _end_ids(vocabulary: _Vocabulary, eos: int | None) -> list[int]:
    """Ids that end a sequence: those named by keys, and tokens with a text of END_TEXTS."""
    named = [eos, vocabulary.id_of("eot"), vocabulary.id_of("eom")]
    known = [place for place, token in enumerate(vocabulary.tokens) if token in END_TEXTS]
    return [place for place in [*named, *known] if place is not None]


def _templates(metadata: Mapping[str, Any], file: str) -> dict[str, str]:
    """Chat templates by name."""
    prefix = "tokenizer.chat_template"
    found = {key: value for key, value in metadata.items() if key.startswith(prefix) and isinstance(value, str)}
    names = {key: key.removeprefix(prefix).removeprefix(".") or DEFAULT_TEMPLATE for key in found}
    return {names[key]: TemplateText(value, file) for key, value in found.items()}


_Made = tuple[Backend, TokenTexts, dict[str, int]]


def _byte_level(vocabulary: _Vocabulary) -> _Made:
    """Byte-level BPE: a tokenizers.Tokenizer."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models

    kind = vocabulary.metadata.get("tokenizer.ggml.pre")
    if not kind:
        logger.warning("%s: tokenizer.ggml.pre is missing; words are cut as in 'default', which is a guess", vocabulary.file)
        kind = "default"
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(sorted(KINDS))
        raise UnsupportedError(f"{vocabulary.file}: tokenizer.ggml.pre is {repr(kind)[:80]}; supported are {known}")
    words = KINDS[kind]
    ids = {token: place for place, token in enumerate(vocabulary.tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.array("merges", str)]
    try:
        model = models.BPE(ids, merges, ignore_merges=words.whole_words)
    except Exception as error:  # the library raises a bare Exception
        raise vocabulary.error("merges", f"and tokens contradict each other: {error}") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _cutter(words.patterns, ids)
    backend.decoder = decoders.ByteLevel()
    cut_out, special = vocabulary.ids_of(CUT_OUT), vocabulary.ids_of(SPECIAL)
    hidden = frozenset(special)
    backend.add_tokens([AddedToken(vocabulary.tokens[place], special=place in hidden, normalized=False) for place in cut_out])
    bos = vocabulary.added_id("bos", vocabulary.flag("add_bos_token", words.adds_bos))
    eos = vocabulary.added_id("eos", vocabulary.flag("add_eos_token", False))
    backend.post_processor = _adder(bos, eos)
    table = [byte_level_text(token) for token in vocabulary.tokens]
    for place in cut_out:
        table[place] = vocabulary.tokens[place].encode()
    return cast(Backend, backend), TokenTexts(table, False, special, cut_out), {}


def _adder(bos: int | None, eos: int | None) -> tokenizers.processors.PostProcessor:
    """A post-processor that adds these ids at the beginning and the end of a text."""
    from tokenizers.processors import TemplateProcessing

    named = [(name, token) for name, token in (("[BOS]", bos), ("[EOS]", eos)) if token is not None]
    single = " ".join([*(["[BOS]"] if bos is not None else []), "$A", *(["[EOS]"] if eos is not None else [])])
    return TemplateProcessing(single=single, special_tokens=named)


def _cutter(patterns: Sequence[str], ids: Mapping[str, int]) -> tokenizers.pre_tokenizers.PreTokenizer:
    """A pre-tokenizer that cuts by the patterns in order, maps bytes to characters, and removes characters without a token."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

    steps: list[PreTokenizer] = [Split(Regex(regex(pattern)), "isolated") for pattern in patterns]
    steps.append(ByteLevel(add_prefix_space=False, use_regex=False))
    missing = "".join(f"\\x{{{ord(char):x}}}" for char in byte_characters() if char not in ids)
    if missing:
        steps.append(Split(Regex(f"[{missing}]"), "removed"))
    return Sequence(steps)


def _sentencepiece(vocabulary: _Vocabulary) -> _Made:
    """SentencePiece's BPE."""
    from .spm import SpmTokenizer

    tokens, types = vocabulary.tokens, vocabulary.types
    scores = [0.0] * len(tokens)
    if "tokenizer.ggml.scores" in vocabulary.metadata:
        scores = [float(score) for score in vocabulary.array("scores", float, int)]
    if len(scores) < len(tokens):
        raise vocabulary.error("scores", f"wanted {len(tokens)} entries, have {len(scores)}")
    add_space = vocabulary.flag("add_space_prefix", True)
    table = [_piece_text(token, kind) for token, kind in zip(tokens, types, strict=True)]
    texts = TokenTexts(table, add_space, vocabulary.ids_of(SPECIAL), vocabulary.ids_of(CUT_OUT))
    defaults = {"bos": 1, "eos": 2, "unknown": 0}
    ids = {token: place for place, token in enumerate(tokens)}
    backend = SpmTokenizer(
        tokens,
        scores,
        texts,
        cut_out=vocabulary.ids_of(CUT_OUT),
        byte_ids=[ids.get(f"<0x{byte:02X}>", ids.get(chr(byte)) if byte < 128 else None) for byte in range(256)],
        unknown=vocabulary.id_of("unknown", 0),
        bos=vocabulary.added_id("bos", vocabulary.flag("add_bos_token", True), 1),
        eos=vocabulary.added_id("eos", vocabulary.flag("add_eos_token", False), 2),
        add_space_prefix=add_space,
    )
    return backend, texts, defaults


def _plamo(vocabulary: _Vocabulary) -> _Made:
    """PLaMo's pieces with scores; the cut with the best score is chosen."""
    from .plamo_tokenizer import PlamoTokenizer

    words = {CONTROL: "CONTROL", UNKNOWN: "UNKNOWN", BYTE: "BYTE"}
    scores = [float(score) for score in vocabulary.array("scores", float, int)]
    if not all(map(math.isfinite, scores)):
        raise vocabulary.error("scores", "wanted finite numbers")
    if len(scores) != len(vocabulary.tokens):
        raise vocabulary.error("scores", f"wanted {len(vocabulary.tokens)} entries, have {len(scores)}")
    defaults = {"bos": 1, "eos": 2, "unknown": 0}
    backend = PlamoTokenizer(
        vocabulary.tokens,
        scores,
        [words.get(kind, "NORMAL") for kind in vocabulary.types],
        added={vocabulary.tokens[place]: place for place in vocabulary.ids_of(CUT_OUT)},
        unknown=vocabulary.id_of("unknown", 0) or 0,
        bos=vocabulary.added_id("bos", vocabulary.flag("add_bos_token", False), 1),
        eos=vocabulary.added_id("eos", vocabulary.flag("add_eos_token", False), 2),
    )
    return backend, backend.texts(vocabulary.ids_of(SPECIAL)), defaults


def _piece_text(token: str, kind: int) -> bytes:
    """Text bytes of a SentencePiece token."""
    if kind in CUT_OUT:
        return token.encode()
    byte = byte_fallback(token) if kind == BYTE else None
    return byte if byte is not None else token.replace(SPACE_MARK, " ").encode()
