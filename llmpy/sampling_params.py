"""SamplingParams: what a request asks of the sampler, checked when it is made and never changed afterwards."""

from __future__ import annotations

import copy
import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from . import sampling_checks as rules
from .checks import as_bool, as_float, as_int, frozen, refuse_names
from .errors import InvalidRequestError
from .sampling_checks import Row, at_least, check, must, only, row, within

if TYPE_CHECKING:
    from typing import Unpack

    from .keywords import SamplingKeywords
    from .results.beam_search import BeamSearchParams as BeamSearchParams
    from .structured.params import StructuredOutputsParams as StructuredOutputsParams

GREEDY_BELOW = 1e-5
REPETITION = within(1e-6, 1e6)
"""Within these bounds no finite logit, a float32, becomes infinite, whatever the other parameters are."""
COUNT = must(lambda count: count >= -1, "be non-negative or -1")


class RequestOutputKind(enum.Enum):
    """What step() and AsyncEngine show of a running request: everything so far, only what is new, or only the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _output_kind(name: str, value: object) -> RequestOutputKind:
    if isinstance(value, str) and value in RequestOutputKind.__members__:
        return RequestOutputKind[value]
    if not isinstance(value, RequestOutputKind):
        raise TypeError(f"{name} must be a RequestOutputKind, but is of type {type(value).__name__}")
    return value


def one_sample_if_greedy(name: str, values: dict[str, Any]) -> None:
    """Refuses several samples where no random numbers are drawn."""
    if values["n"] != 1 and values["temperature"] < GREEDY_BELOW:
        message = f"n must be 1 when using greedy sampling, got {values['n']}."
        raise InvalidRequestError(message, parameter="n", value=values["n"])


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Frozen: `replace()` gives a changed copy.

    Args:
        n: Samples per prompt, from 1 to 16384; 1 where sampling is greedy. Default 1.
        temperature: Divides the logits, 0 or more; below 1e-5 the most likely token is taken (greedy). Default 1.
        top_p: Keeps the fewest most probable tokens that reach this probability, above 0 and up to 1; 1 = off, the default.
        top_k: Keeps this many most probable tokens; 0 (the default) or -1 = off.
        min_p: Removes tokens less probable than this share of the most probable one, from 0 to 1; 0 = off, the default.
        presence_penalty: Subtracted once from the logits of tokens already generated, from -2 to 2. Default 0.
        frequency_penalty: Subtracted for every time a token was generated, from -2 to 2. Default 0.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt and output, 1e-6 to 1e6;
            1 = off, the default.
        max_tokens: Most tokens to generate, at least 1; None = up to `max_model_len`. The default depends on where it is left
            out: `SamplingParams()` has 16; a call without `sampling_params` (`llm.generate(p, temperature=0)`) has the
            `max_new_tokens` of the model's generation_config.json, else 256.
        min_tokens: None of the first so many tokens ends the output, except by length: end-of-sequence and stop ids are not
            drawn, and a stop string that such a token completes is passed over. The token behind them is the first that can.
            From 0 to `max_tokens`; default 0.
        stop: Strings that end the text of the output. That text begins with the character that the prompt's last bytes
            open, if they do, and holds nothing else of the prompt. Default none.
        stop_token_ids: Ids that end the output. Default none.
        ignore_eos: Go on after the end-of-sequence token. Default False.
        include_stop_str_in_output: Keep the stop string, or the stop token's text, in the text. Default False.
        seed: Root of the random numbers, from 0 to 2**64 - 1; None (the default) or -1 = made from the engine's seed and the
            number of the request.
        sample_index: Index of the first of the n samples, from 0 to 2**31; sample i draws as sample_index + i. Default 0.
        logprobs: None = none, the default; 0 = those of the sampled tokens; k = those and the k best alternatives, k up to
            the engine's `max_logprobs`. True = 1.
        prompt_logprobs: The same for the prompt's tokens, in raw mode. Default None.
        prompt_logprobs_start: Not supported yet.
        logprobs_mode: "raw_logprobs", "full_logprobs" or "processed_logprobs"; None = the engine's, the default.
        logprob_token_ids: Not supported yet.
        logit_bias: Token id -> number added to its logit, -1e20 to 1e20; -inf bans it. Default None.
        allowed_token_ids: All other ids are banned, end of sequence too unless listed. Default None: all are allowed.
        bad_words: Words that are never completed. Default none.
        bad_token_ids: Id sequences that are never completed. Default none.
        detokenize: Whether text is made. Default True.
        skip_special_tokens: Hide special tokens in the text. Default True.
        spaces_between_special_tokens: Whether neighbouring added tokens that are shown have a space between them. Default True.
        output_kind: What `step()` returns while the request runs. Default RequestOutputKind.CUMULATIVE.
        structured_outputs: What the text must be: JSON of a schema, a match of a regular expression, one of several, or of a
            grammar; StructuredOutputsParams or a dict of its fields. Default None.
        speculative: Whether drafts are made, if the engine has `speculative_config`. Never changes a result. Default True.
        stream_interval, routed_experts, repetition_detection, thinking_token_budget, extra_args: Not supported yet.

    Raises:
        TypeError: A field has a wrong type, or the name is no field.
        InvalidRequestError: A field has a bad value; `.parameter` and `.value` tell which.
        UnsupportedError: A field that is not supported yet was set.

    Example:
        >>> params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, stop=["\\n\\n"])
        >>> greedy = params.replace(temperature=0)
    """

    # fmt: off
    # The table of sampling parameters: a row has all that Python knows of one, beside the text above and the type that
    # keywords.py repeats for type checkers. Rules run in the table's order.
    n: int = field(default=1, metadata=row(
        as_int, at_least(1), must(lambda n: n <= 16384, "be at most 16384"), off=(1,), plain=True))
    presence_penalty: float = field(default=0.0, metadata=row(as_float, within(-2, 2), off=(0,), plain=True))
    frequency_penalty: float = field(default=0.0, metadata=row(as_float, within(-2, 2), off=(0,), plain=True))
    repetition_penalty: float = field(default=1.0, metadata=row(
        as_float, rules.finite, must(lambda x: x > 0, "be greater than zero"), REPETITION,
        off=(1,), key="repetition_penalty", plain=True))
    temperature: float = field(default=1.0, metadata=row(
        as_float, rules.finite, must(lambda t: t >= 0, "be non-negative"), key="temperature"))
    top_p: float = field(default=1.0, metadata=row(
        as_float, must(lambda p: 0 < p <= 1, "be in (0, 1]"), off=(1,), key="top_p", plain=True))
    top_k: int = field(default=0, metadata=row(
        rules.integer, must(lambda k: k >= -1, "be 0 (disable), or at least 1"), off=(0, -1), key="top_k"))
    min_p: float = field(default=0.0, metadata=row(as_float, within(0, 1), off=(0,), key="min_p", plain=True))
    max_tokens: int | None = field(default=16, metadata=row(
        rules.optional_int, at_least(1, " To score a prompt without generating, call score()."), key="max_new_tokens"))
    min_tokens: int = field(default=0, metadata=row(
        as_int, must(lambda n: n >= 0, "be greater than or equal to 0"), rules.at_most_max_tokens,
        off=(0,), key="min_new_tokens"))
    logprobs: int | None = field(default=None, metadata=row(
        rules.logprob_count, COUNT, rules.agrees_with_ids, rules.not_whole_vocabulary))
    prompt_logprobs: int | None = field(default=None, metadata=row(rules.logprob_count, COUNT, rules.not_whole_vocabulary))
    logprobs_mode: Literal["raw_logprobs", "full_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] | None = (
        field(default=None, metadata=row(rules.anything, rules.known_mode)))
    stop_token_ids: Sequence[int] | None = field(default=(), metadata=row(
        rules.some_ids, rules.no_ids_for_none, rules.integers))
    bad_token_ids: Sequence[Sequence[int]] | None = field(default=(), metadata=row(rules.some_ids, rules.sequences_of_integers))
    stop: str | Sequence[str] | None = field(default=(), metadata=row(rules.string_or_strings, rules.stops))
    bad_words: Sequence[str] | None = field(default=(), metadata=row(rules.strings, rules.words))
    logit_bias: Mapping[int, float] | None = field(default=None, metadata=row(rules.mapping, rules.biases))
    allowed_token_ids: Sequence[int] | None = field(default=None, metadata=row(rules.some_ids, rules.integers, rules.not_empty))
    seed: int | None = field(default=None, metadata=row(
        rules.int_or_drawn, one_sample_if_greedy, must(lambda seed: 0 <= seed < 2**64, "be in [0, 2**64)")))
    sample_index: int = field(default=0, metadata=row(
        as_int, at_least(0), must(lambda index: index <= 2**31, "be at most 2**31"), plain=True))
    ignore_eos: bool = field(default=False, metadata=row(as_bool, plain=True))
    include_stop_str_in_output: bool = field(default=False, metadata=row(as_bool))
    detokenize: bool = field(default=True, metadata=row(as_bool))
    skip_special_tokens: bool = field(default=True, metadata=row(as_bool, off=(True,)))
    spaces_between_special_tokens: bool = field(default=True, metadata=row(as_bool, off=(True,)))
    output_kind: RequestOutputKind = field(default=RequestOutputKind.CUMULATIVE, metadata=row(_output_kind))
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = field(default=None, metadata=row(rules.structured))
    speculative: bool = field(default=True, metadata=row(as_bool, off=(True,), plain=True))
    prompt_logprobs_start: int = field(default=0, metadata=row(as_int, only(0)))
    logprob_token_ids: Sequence[int] | None = field(default=None, metadata=row(rules.some_ids, only(None)))
    stream_interval: int = field(default=1, metadata=row(as_int, only(1)))
    routed_experts: bool = field(default=False, metadata=row(as_bool, only(False)))
    repetition_detection: object = field(default=None, metadata=row(rules.anything, only(None)))
    thinking_token_budget: object = field(default=None, metadata=row(rules.anything, only(None)))
    extra_args: object = field(default=None, metadata=row(rules.anything, only(None)))
    # fmt: on

    def __post_init__(self) -> None:
        check(self.__dict__, ROWS)

    def __hash__(self) -> int:
        return hash(frozen([getattr(self, name) for name in _DEFAULTS]))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def search(self) -> BeamSearchParams | None:
        """The beam search that these parameters stand for, or None."""
        return None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def constraint(self) -> StructuredOutputsParams | None:
        """`structured_outputs`, of which a dict has become StructuredOutputsParams."""
        found: Any = self.structured_outputs
        return found  # type: ignore[no-any-return]

    def replace(self, **changes: Unpack[SamplingKeywords]) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        changed = SamplingParams(**{**{name: getattr(self, name) for name in _DEFAULTS}, **changes})
        changed.__dict__["_given"] = self.__dict__["_given"] | changes.keys()
        return changed

    def clone(self) -> SamplingParams:
        """A copy."""
        return copy.copy(self)

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON; `SamplingParams(**d)` takes them back."""
        values = {name: getattr(self, name) for name in _DEFAULTS}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        values["bad_token_ids"] = [list(ids) for ids in values["bad_token_ids"]]
        values["output_kind"] = self.output_kind.name
        if self.constraint is not None:
            values["structured_outputs"] = self.constraint.to_dict()
        return values

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingParams:
        """Parameters of a model's generation_config.json; what is absent or null keeps its default.

        Args:
            config: The file's content. `max_new_tokens` and `min_new_tokens` become `max_tokens` and `min_tokens`;
                `do_sample: false` is greedy; keys about other things are left aside.
        """
        return cls(**sampling_fields(config))

    def __repr__(self) -> str:
        defaults = _DEFAULTS
        shown = {name: getattr(self, name) for name in defaults}
        parts = [f"{name}={value!r}" for name, value in shown.items() if value != defaults[name]]
        return f"SamplingParams({', '.join(parts)})"


def sampling_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams that a generation config sets."""
    found = {ours: config[key] for key, ours in GENERATION_KEYS.items() if config.get(key) is not None}
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def has_default_length(params: SamplingParams) -> bool:
    """Whether the caller left `max_tokens` out."""
    return "max_tokens" not in params.__dict__["_given"]


def default_params(config: Mapping[str, Any], max_tokens: int) -> SamplingParams:
    """Parameters of a generation config, with a limit that counts as left out by the caller."""
    found = sampling_fields(config)
    params = SamplingParams(**{"max_tokens": max_tokens, **found})
    params.__dict__["_given"] = frozenset(found)
    return params


def _refuse(self: object, name: str, *value: object) -> None:
    raise AttributeError(f"SamplingParams is frozen: cannot change {name!r}; use params.replace({name}=...)")


def _finish() -> None:
    """Gives the class an __init__ that knows near names and what was set, and an advice when a field is assigned."""
    generated = SamplingParams.__init__

    @functools.wraps(generated)
    def __init__(self: SamplingParams, *args: object, **given: Any) -> None:
        if args:
            raise TypeError("SamplingParams() takes keyword arguments only: SamplingParams(temperature=0.8)")
        if not given.keys() <= _DEFAULTS.keys():
            refuse_names("SamplingParams", [name for name in given if name not in _DEFAULTS], _DEFAULTS)
        self.__dict__["_given"] = frozenset(given)
        generated(self, **given)

    for name, method in {"__init__": __init__, "__setattr__": _refuse, "__delattr__": _refuse}.items():
        type.__setattr__(SamplingParams, name, method)


_DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(SamplingParams)}
ROWS: dict[str, Row] = {one.name: one.metadata["row"] for one in fields(SamplingParams)}
GENERATION_KEYS = {one.key: name for name, one in ROWS.items() if one.key}
"""Keys of generation_config.json, and the names of the fields."""
FLAGS = {
    "max_tokens": "N", "temperature": "T", "top_p": "P", "top_k": "K", "min_p": "P", "seed": "N", "stop": "TEXT",
    "presence_penalty": "X", "frequency_penalty": "X", "repetition_penalty": "X",
}  # fmt: skip
"""Fields that are flags of the command line and settings of its chat, and what the help calls their values."""
_finish()

_MOVED = {"StructuredOutputsParams": "structured.params", "BeamSearchParams": "results.beam_search"}

if not TYPE_CHECKING:  # code written for vLLM looks for these here

    def __getattr__(name: str) -> object:
        from .advice import lazy

        return lazy(__name__, _MOVED, name)
