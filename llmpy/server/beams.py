"""Beam search over HTTP: `use_beam_search`, with `n` as the number of beams, under the names of vLLM's server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..results.beam_search import MAX_WIDTH, BeamSampling, BeamSearchParams, sampling_of
from .errors import HttpError
from .fields import NEUTRAL, OFF
from .protocol import ChatRequest, CompletionRequest, Sampling

ALONE = ("length_penalty", "early_stopping")
"""Fields that need `use_beam_search`."""
SHOWN = ("skip_special_tokens", "spaces_between_special_tokens")
"""Fields of SamplingParams that concern the text of a search, not its tokens."""
WITHOUT = (
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "stop_token_ids",
)
"""Fields that would change the answer of a sample; a search does not support them."""


def check(body: Sampling) -> None:
    """Refuses fields that exclude each other.

    Raises:
        HttpError: 400, a field needs `use_beam_search`, or is not supported with it.
    """
    if not body.use_beam_search:
        for name in ALONE:
            if getattr(body, name) not in NEUTRAL.get(name, OFF):
                raise HttpError(400, f"{name} is only allowed with use_beam_search; leave it out", name)
        return
    for name in WITHOUT:
        if getattr(body, name) not in NEUTRAL.get(name, OFF):
            raise _refusal(name)
    if body.prompt_logprobs is not None:
        raise _refusal("prompt_logprobs")
    width = 1 if body.n is None else body.n
    if not 1 <= width <= MAX_WIDTH:
        raise HttpError(400, f"n: wanted 1 to {MAX_WIDTH} with use_beam_search, have {width}", "n")
    name = "top_logprobs" if isinstance(body, ChatRequest) else "logprobs"
    if not 0 <= (getattr(body, name) or 0) <= 2 * width:
        message = f"{name}: wanted at most 2 * n ({2 * width}) with use_beam_search, have {getattr(body, name)}"
        raise HttpError(400, message, name)
    if isinstance(body, CompletionRequest) and body.echo and (body.logprobs is not None or body.max_tokens == 0):
        raise HttpError(400, "echo with logprobs or max_tokens=0 is not supported with use_beam_search; leave it out", "echo")


def _refusal(name: str) -> HttpError:
    return HttpError(400, f"{name} is not supported with use_beam_search; leave it out", name)


def search_of(body: Sampling, fields: Mapping[str, Any], max_model_len: int) -> BeamSampling:
    """The sampling parameters of a request's beam search.

    Args:
        body: The request, which `check` has accepted.
        fields: Its fields of SamplingParams. Their `logprobs` are the alternatives to show.
        max_model_len: Most tokens of a text if `fields` has no limit.
    """
    own = {name: fields[name] for name in ("ignore_eos", "include_stop_str_in_output", "stop") if name in fields}
    for name in ALONE:
        if getattr(body, name) is not None:
            own[name] = getattr(body, name)
    search = BeamSearchParams(
        beam_width=body.n or 1,
        max_tokens=max_model_len if fields["max_tokens"] is None else fields["max_tokens"],
        temperature=body.temperature or 0.0,
        structured_outputs=fields["structured_outputs"],
        **own,
    )
    return sampling_of(search, fields["logprobs"], **{name: fields[name] for name in SHOWN if name in fields})
