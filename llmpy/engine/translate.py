"""Translates SamplingParams into parameters of the core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..sampling_params import ROWS, SamplingParams

if TYPE_CHECKING:
    from ..config import EngineConfig
    from .context import Context
    from .requests import Request

_FLOAT32_MAX = 3.4028234663852886e38
_PLAIN = [name for name, row in ROWS.items() if row.is_plain]
"""Parameters that the core takes as they are."""


class Translator:
    """Translates checked parameters for one engine.

    Args:
        context: Vocabulary and tokenizer.
        config: Resolved options.
        max_model_len: Longest sequence.
    """

    def __init__(self, context: Context, config: EngineConfig, max_model_len: int) -> None:
        self._context = context
        self._default_mode = config.logprobs_mode
        self._max_model_len = max_model_len

    def mode(self, params: SamplingParams) -> str:
        """The logprobs mode of a request."""
        return params.logprobs_mode or self._default_mode

    def core_matches_stops(self, params: SamplingParams) -> bool:
        """Whether the core can search stop strings: a text is the concatenation of its tokens' bytes."""
        joined = params.skip_special_tokens or params.spaces_between_special_tokens
        return joined and self._context.token_bytes is not None

    def core_params(self, params: SamplingParams) -> dict[str, Any]:
        """The core's form of the parameters, without the seed and the prompt's fields."""
        size = self._context.vocab_size
        values = params.__dict__
        found: dict[str, Any] = {name: values[name] for name in _PLAIN}
        found |= {
            "temperature": 0.0 if params.is_greedy else min(params.temperature, _FLOAT32_MAX),
            "top_k": min(max(params.top_k, 0), size),
            "max_tokens": None if params.max_tokens is None else min(params.max_tokens, self._max_model_len),
            "min_tokens": min(params.min_tokens, self._max_model_len),
            "logprobs": _at_most(params.logprobs, size),
            "prompt_logprobs": _at_most(params.prompt_logprobs, size),
            "logprobs_mode": self.mode(params),
            "hide_special": params.skip_special_tokens,
        }
        if params.search is not None:
            from ..results.beam_search import core_search

            found |= core_search(params.search)
        if params.stop_token_ids:
            found["stop_token_ids"] = sorted({token for token in params.stop_token_ids if 0 <= token < size})
        if params.logit_bias:
            found["logit_bias"] = dict(params.logit_bias)
        if params.allowed_token_ids is not None:
            found["allowed_token_ids"] = sorted(set(params.allowed_token_ids))
        if params.bad_words or params.bad_token_ids:
            found["bad_words"] = self._bad_sequences(params)
        if params.constraint is not None:
            from ..structured.lark import library_path

            assert self._context.tokenizer is not None  # a constraint without a tokenizer was refused
            parts = (*params.constraint.language_of(self._context.tokenizer), library_path())
            found["grammar"] = tuple(part.encode("utf-8", "surrogatepass") for part in parts)
        if params.stop_strings and self.core_matches_stops(params):
            found["stop"] = [stop.encode("utf-8", "surrogatepass") for stop in params.stop_strings]
        return found

    def _bad_sequences(self, params: SamplingParams) -> list[list[int]]:
        """Id sequences of the bad words, each without and with a leading space, and the id sequences given by the caller."""
        found = [list(ids) for ids in params.bad_token_ids or ()]
        words = [word.lstrip() or word for word in params.bad_words or ()]
        if words:
            assert self._context.tokenizer is not None
            encoded = self._context.tokenizer.encode_batch([*words, *(" " + word for word in words)], add_special_tokens=False)
            for bare, spaced in zip(encoded[: len(words)], encoded[len(words) :], strict=True):
                is_other = spaced[:1] != bare[:1] and len(spaced) == len(bare)
                found += [bare, spaced] if is_other else [bare]
        return [ids for ids in found if ids and all(0 <= token < self._context.vocab_size for token in ids)]

    def prompt_params(self, request: Request, base: Mapping[str, Any], priority: int = 0) -> dict[str, Any]:
        """The complete core parameters of a request."""
        found = {**base, "seed": request.seed}
        if priority:
            found["priority"] = priority
        if request.prompt.prior is not None and len(request.prompt.prior):
            found["prior"] = request.prompt.prior.tobytes()
        if request.prompt.types is not None:
            found["token_type_ids"] = request.prompt.types.tobytes()
        if request.prompt.salt is not None:
            found["salt"] = request.prompt.salt.encode("utf-8", "surrogatepass")
        if request.prompt.adapter is not None:
            found["adapter"] = request.prompt.adapter.number
            found["text_key"] = request.prompt.adapter.text_key
        if request.prompt.images:
            from .images import core_params

            n_tokens = 0 if request.prompt.ids is None else len(request.prompt.ids)
            found |= core_params(request.prompt.images, n_tokens, self._context.has_axes)
        return found


def _at_most(count: int | None, size: int) -> int | None:
    return None if count is None else min(count, size)
