"""How texts are cut into words before byte-level BPE, by the name that GGUF files give (`tokenizer.ggml.pre`).

Each kind is a list of patterns; each cuts the pieces that the one before left, keeping matches and gaps. The ids
must be those of llama.cpp, whose patterns differ here and there from the models' own tokenizer.json.
"""

from __future__ import annotations

from typing import NamedTuple

_SUFFIX = "'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _llama3(digits: str, letters: str = r"\p{L}", suffix: str = _SUFFIX + "|") -> str:
    """The pattern of Llama 3 and of those that differ in digits, letters, or English suffixes."""
    other = r"\p{L}\p{N}" if letters == r"\p{L}" else r"\p{L}\p{M}\p{N}"
    return rf"{suffix}[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^\s{other}]+[\r\n]*|{_BLANKS}"


def _cased(suffix: str, digits: str) -> str:
    """Words cut where lower case ends, for ASCII letters; other letters count as both cases."""
    start, low, high = r"[^\r\n\p{L}\p{N}]?", r"(?:(?=\p{L})[^A-Z])", r"(?:(?=\p{L})[^a-z])"
    words = rf"{start}{high}*{low}+{suffix}|{start}{high}+{low}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


_CASED_LETTERS = (  # what deepseek-llm takes for letters
    r"A-Za-zµÀ-ÖØ-öø-\u01BA\u01BC-\u01BF\u01C4-\u0293\u0295-\u02AF\u0370-\u0373\u0376\u0377\u037B-\u037D\u037F\u0386"
    r"\u0388-\u038A\u038C\u038E-\u03A1\u03A3-\u03F5\u03F7-\u0481\u048A-\u052F\u0531-\u0556\u10A0-\u10C5\u13A0-\u13F5"
    r"\u13F8-\u13FD\u1C90-\u1CBA\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-\u1D77\u1D79-\u1D9A\u1E00-\u1F15\u1F18-\u1F1D"
    r"\u1F20-\u1F45\u1F48-\u1F4D\u1F50-\u1F57\u1F59\u1F5B\u1F5D\u1F5F-\u1F7D\u1F80-\u1FB4\u1FB6-\u1FBC\u1FBE"
    r"\u1FC2-\u1FC4\u1FC6-\u1FCC\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-\u1FEC\u1FF2-\u1FF4\u1FF6-\u1FFC\u2102\u2107"
    r"\u210A-\u2113\u2115\u2119-\u211D\u2124\u2126\u2128\u212A-\u212D\u212F-\u2134\u2139\u213C-\u213F\u2145-\u2149"
    r"\u214E\u2183\u2184\u2C00-\u2C7B\u2C7E-\u2CE4\u2CEB-\u2CEE\u2CF2\u2CF3\uA640-\uA66D\uA680-\uA69B\uA722-\uA76F"
    r"\uA771-\uA787\uA78B-\uA78E\uAB70-\uABBF\uFB00-\uFB06\uFB13-\uFB17\uFF21-\uFF3A\uFF41-\uFF5A\U00010400-\U0001044F"
    r"\U000104B0-\U000104D3\U000104D8-\U000104FB\U00010C80-\U00010CB2\U00010CC0-\U00010CF2\U000118A0-\U000118DF"
    r"\U0001E900-\U0001E943"
)
_ASIAN = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"
_SYMBOL = r"[\p{S}&&[^~]]"  # an ASCII tilde is no symbol for llama.cpp


class Words(NamedTuple):
    """How one kind cuts.

    Args:
        patterns: Regular expressions, applied in turn.
        whole_words: A word that is in the vocabulary is taken as it is, whatever the merges say.
        adds_bos: BOS is added unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False


_LLAMA3 = _llama3(r"\p{N}{1,3}")
_QWEN2 = _llama3(r"\p{N}")
_GROUPS = {
    "gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat a.x-4.0 mellum granite-docling": Words((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Words((r"\p{N}", _GPT2)),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": Words((_LLAMA3,), True, True),
    "dbrx smaug-bpe chatglm-bpe glm4": Words((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen kormo stablelm2 hunyuan solar-open megrez grok-2": Words((_QWEN2,)),
    "qwen35": Words((_llama3(r"\p{N}", r"\p{L}\p{M}"),)),
    "tekken": Words((_cased("", r"\p{N}"),), True, True),
    "gpt-4o llama4 kanana2": Words((_cased(f"(?:{_SUFFIX})?", r"\p{N}{1,3}"),)),
    "falcon": Words((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "default": Words((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "deepseek-llm": Words(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+",
            r"\s+$",
            _ASIAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")),
    "deepseek-v3 hunyuan-dense": Words(
        (
            r"\p{N}{1,3}",
            r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
            rf"|(?:(?!{_SYMBOL})[^\r\n\p{{L}}\p{{P}}])?[\p{{L}}\p{{M}}]+"
            rf"| ?(?:\p{{P}}|{_SYMBOL})+[\r\n]*|{_BLANKS}",
        )
    ),
    "seed-coder": Words((rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",)),
}
KINDS = {kind: words for names, words in _GROUPS.items() for kind in names.split()}
