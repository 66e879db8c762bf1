"""Beam search: its parameters and its results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..checks import as_bool, as_float, as_int
from ..errors import InvalidRequestError, LlmpyError
from ..outputs import to_plain
from ..sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from ..logprobs import Ints, Logprobs
    from ..lora import LoRARequest
    from ..structured.params import StructuredOutputsParams

MAX_WIDTH = 64
_RULES = {"never": "never", False: "cannot_win", True: "found"}
"""Values of early_stopping, and the core's names for them."""


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search.

    Args:
        beam_width: Number of beams, and the most texts that are found, from 1 to 64.
        max_tokens: Most tokens of a text, at least 1.
        ignore_eos: Go on after the end-of-sequence token.
        temperature: Divides the logits before their logprobs are taken, 0 or more; below 1e-5, as by default, it means 1.
        length_penalty: A text's score is its logprob divided by (its tokens ** length_penalty); a larger number favours long
            texts. Default 1: the mean logprob.
        include_stop_str_in_output: Keep the stop string in the text.
        stop: Strings that end a text. Default none.
        structured_outputs: What every text must be, as in SamplingParams. Default None.
        early_stopping: When a search ends that has found `beam_width` texts. "never", the default: when no beam can become
            better than the worst of them at any length. False: when none would be better if it ended now. True: at once.
            As in transformers, whose default is False.

    Raises:
        TypeError: A field has a wrong type.
        InvalidRequestError: A field has a bad value; `.parameter` and `.value` tell which.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    stop: str | Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    early_stopping: bool | Literal["never"] = "never"

    def __post_init__(self) -> None:
        width = as_int("beam_width", self.beam_width)
        if not 1 <= width <= MAX_WIDTH:
            raise _bad("beam_width", width, f"be at least 1 and at most {MAX_WIDTH}")
        if as_int("max_tokens", self.max_tokens) < 1:
            raise _bad("max_tokens", self.max_tokens, "be at least 1")
        temperature = as_float("temperature", self.temperature)
        if not 0 <= temperature < math.inf:
            raise _bad("temperature", temperature, "be a finite number, 0 or more")
        if not math.isfinite(as_float("length_penalty", self.length_penalty)):
            raise _bad("length_penalty", self.length_penalty, "be a finite number")
        if not (self.early_stopping == "never" or isinstance(self.early_stopping, bool)):
            raise _bad("early_stopping", self.early_stopping, "be True, False or 'never'")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            as_bool(name, getattr(self, name))


def _bad(name: str, value: object, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must {wanted}, got {value}.", parameter=name, value=value)


class BeamSampling(SamplingParams):
    """A beam search in the form of sampling parameters: `n` is the width, and the samples are the texts, best first."""

    @property
    def search(self) -> BeamSearchParams:
        """The parameters of the search."""
        found: BeamSearchParams = self.__dict__["_search"]
        return found

    @property
    def shown_logprobs(self) -> int | None:
        """Number of alternatives in the logprobs of a RequestOutput's samples; None: they have no logprobs."""
        found: int | None = self.__dict__["_shown"]
        return found


def sampling_of(search: object, shown_logprobs: int | None = None, **more: Any) -> BeamSampling:
    """The sampling parameters of a beam search.

    Args:
        search: BeamSearchParams.
        shown_logprobs: Number of alternatives in the logprobs of a RequestOutput's samples; None: they have no logprobs. The
            logprobs of a BeamSearchOutput do not depend on it.
        more: Further fields of SamplingParams, about the text alone.
    """
    if not isinstance(search, BeamSearchParams):
        raise TypeError(f"params must be BeamSearchParams or a list of them, but is of type {type(search).__name__}")
    params = BeamSampling(
        n=search.beam_width,
        max_tokens=search.max_tokens,
        ignore_eos=search.ignore_eos,
        include_stop_str_in_output=search.include_stop_str_in_output,
        stop=search.stop,
        structured_outputs=search.structured_outputs,
        logprobs=2 * search.beam_width,
        logprobs_mode="full_logprobs",
        **{"output_kind": RequestOutputKind.FINAL_ONLY, **more},
    )
    params.__dict__.update(_search=search, _shown=shown_logprobs)
    return params


def core_search(search: BeamSearchParams) -> dict[str, Any]:
    """The core's parameters of a beam search, beside those of its sampling."""
    return {
        "temperature": 1.0 if search.temperature == 0 else search.temperature,
        "beam_width": search.beam_width,
        "length_penalty": search.length_penalty,
        "early_stopping": _RULES[search.early_stopping],
    }


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class BeamSearchSequence:
    """A text that a beam search has found.

    Args:
        tokens: Ids of the prompt and of the text.
        token_ids: Ids of the text, with the end-of-sequence token that ended it.
        text: The text, without the prompt.
        cum_logprob: Sum of the logprobs of `token_ids`.
        score: `cum_logprob` / len(token_ids) ** length_penalty.
        logprobs: For each token the logprobs of the 2 * beam_width best candidates in its place, the token's own first.
        finish_reason: "stop" or "length".
        stop_reason: The stop string that ended the text, or None.
        lora_request: The adapter, or None.
    """

    tokens: list[int]
    token_ids: list[int]
    text: str
    cum_logprob: float
    score: float
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    lora_request: LoRARequest | None

    def to_dict(self) -> dict[str, Any]:
        """All fields but `logprobs` by name, ready for JSON."""
        return {item.name: to_plain(getattr(self, item.name)) for item in fields(self) if item.name != "logprobs"}

    def __repr__(self) -> str:
        return f"BeamSearchSequence({self.score:.4f}, {len(self.token_ids)} tokens, {self.finish_reason}, {self.text!r})"[:120]


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class BeamSearchOutput:
    """The texts that a beam search has found for a prompt.

    Args:
        sequences: The texts, best score first, at most `beam_width`; fewer only where fewer are possible. Empty if the
            request failed or was aborted.
        index: Index of the prompt in the call's input.
        prompt: Text of the prompt; None for token ids.
        prompt_token_ids_array: int32 [P].
        num_cached_tokens: Prompt tokens found in the prefix cache.
        weight_version: Version of the weights at the last token.
        error: Why the request failed, or None.
    """

    sequences: list[BeamSearchSequence]
    index: int
    prompt: str | None
    prompt_token_ids_array: Ints
    num_cached_tokens: int = 0
    weight_version: int | str = 0
    error: LlmpyError | None = None

    FIELDS: ClassVar[tuple[str, ...]] = ("index", "prompt", "num_cached_tokens", "weight_version", "error")

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's ids as a list."""
        ids: list[int] = self.prompt_token_ids_array.tolist()
        return ids

    @property
    def text(self) -> str:
        """The best text; "" if there is none."""
        return self.sequences[0].text if self.sequences else ""

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        values = {name: to_plain(getattr(self, name)) for name in self.FIELDS}
        return {**values, "prompt_token_ids": self.prompt_token_ids, "sequences": [one.to_dict() for one in self.sequences]}

    def __repr__(self) -> str:
        state = f"error: {self.error}" if self.error is not None else f"{len(self.sequences)} texts, {self.text!r}"
        return f"BeamSearchOutput({self.index}, {state})"[:120]
