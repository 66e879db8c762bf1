"""Pre-tokenizers that cut texts into words before byte-level BPE, by their name in GGUF files (`tokenizer.ggml.pre`).

Each kind is a list of patterns. Each pattern cuts the pieces from the previous one and keeps matches and gaps. The ids must
equal those of llama.cpp; its patterns differ in places from the models' tokenizer.json.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_SUFFIX = "'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _llama3(digits: str, letters: str = r"\p{L}", suffix: str = _SUFFIX + "|") -> str:
    """The pattern of Llama 3, with options for kinds that differ in digits, letters, or English suffixes."""
    other = r"\p{L}\p{N}" if letters == r"\p{L}" else r"\p{L}\p{M}\p{N}"
    return rf"{suffix}[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^\s{other}]+[\r\n]*|{_BLANKS}"


def _cased(suffix: str, digits: str) -> str:
    """A pattern that also cuts words where lower case ends. This applies to ASCII letters; others count as both cases."""
    start, low, high = r"[^\r\n\p{L}\p{N}]?", r"(?:(?=\p{L})[^A-Z])", r"(?:(?=\p{L})[^a-z])"
    words = rf"{start}{high}*{low}+{suffix}|{start}{high}+{low}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


_CASED_LETTERS = (  # the letters of deepseek-llm
    "A-Za-zµÀ-ÖØ-öø-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386"
    "\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    "\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff&&\\S]+"


_LATER = (  # characters newer than Unicode 15.1; in llama.cpp they have no category
    "897 1B4E-1B4F 1B7F 1C89-1C8A 2427-2429 31E4-31E5 A7CB-A7CD A7DA-A7DC 105C0-105F3 10D40-10D8F 10EC2-10EFC "
    "11380-113E2 116D0-116E3 11BC0-11BF9 11F5A 13460-143FA 16100-16139 16D40-16D79 18CFF 1CC00-1CEB3 1E5D0-1E5FF "
    "1F8B2-1F8C1 1FA89-1FA8F 1FABE 1FAC6 1FADC-1FADF 1FAE9 1FBCB-1FBEF"
)


class Words(NamedTuple):
    """A kind of pre-tokenizer.

    Args:
        patterns: Regular expressions, applied in order.
        whole_words: Whether a word in the vocabulary becomes one token regardless of the merges.
        adds_bos: Whether BOS is added by default.
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
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001-\u3002]+",
            r"\s+$",
            _ASIAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")),
    "deepseek-v3 hunyuan-dense": Words(
        (
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}",
        )
    ),
    "seed-coder": Words((rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",)),
}
KINDS = {kind: words for names, words in _GROUPS.items() for kind in names.split()}


def regex(pattern: str) -> str:
    """A pattern of the table with Unicode categories as in llama.cpp."""
    later = re.sub(r"[0-9A-F]+", r"\\x{\g<0>}", _LATER).replace(" ", "")
    return re.sub(r"\\p\{\w+\}", lambda category: f"[{category[0]}&&[^{later}]]", pattern)
