"""Turns the caller's arguments into core requests: tokenises prompts, checks parameters against the model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from ..checks import as_bool
from ..errors import InvalidRequestError, LlmpyError, UnsupportedError
from ..inputs import Prompt, parse, parse_ids
from .adapters import Adapters
from .context import Context
from .images import has_axes
from .translate import Translator

if TYPE_CHECKING:
    from ..sampling_params import SamplingParams
    from ..text.tokenizer import Tokenizer
    from ..vision.images import Images
    from .loading import Loaded

MAX_PROMPT_LOGPROBS_BYTES = 1 << 30
_IMAGE_THREADS = 8
"""Most threads that prepare the images of one call."""


def one_each(params: object, length: int, name: str = "params") -> list[Any]:
    """A list with one value for each prompt, from one value for all or a sequence."""
    if isinstance(params, Sequence) and not isinstance(params, str):
        if len(params) != length:
            raise InvalidRequestError(
                f"The lengths of prompts ({length}) and {name} ({len(params)}) must be the same.", parameter=name
            )
        return list(params)
    return [params] * length


class Frontend:
    """Checks and translates requests for one engine.

    Args:
        loaded: The parts of the loaded engine.
    """

    def __init__(self, loaded: Loaded) -> None:
        self.config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.vocab_size = loaded.vocab_size
        length = loaded.config.max_model_len
        assert isinstance(length, int)
        self.max_model_len = length
        self.generation_defaults = loaded.generation_defaults
        self.pooler = loaded.pooler
        self.adapters = Adapters(loaded.model, loaded.config, loaded.spec["moved"])
        self.images = loaded.images
        self._name = loaded.name
        self._root = loaded.config.seed or 0
        self._ordinals = count()
        self._warned_of_bos = False
        version = "dummy" if loaded.config.load_format == "dummy" else None
        self.context = Context(self.vocab_size, loaded.tokenizer, loaded.token_bytes, version, has_axes(loaded.spec))
        self.translator = Translator(self.context, self.config, length)

    def prompts(self, items: Iterable[object], special_tokens: bool = True) -> list[Prompt | LlmpyError]:
        """Prompts with token ids; a bad prompt gives its error. A text that is too long keeps its error in place of ids."""
        found: list[Prompt | LlmpyError] = []
        given = list(items)
        for index, item in enumerate(given):
            try:
                found.append(item if isinstance(item, Prompt | LlmpyError) else parse(item))
            except LlmpyError as error:
                found.append(at(error, index))
            except TypeError as error:
                raise TypeError(f"prompt {index}: {error}" if len(given) > 1 else str(error)) from None
        self._add_images(found)
        texts = [item for item in found if isinstance(item, Prompt) and item.ids is None and self._can_fit(item)]
        if texts:
            self._tokenize(texts, special_tokens)
        return found

    def _add_images(self, prompts: list[Prompt | LlmpyError]) -> None:
        """Prepares the images of prompts, those of several prompts on several threads; a bad prompt becomes its error."""
        waiting = [index for index, prompt in enumerate(prompts)
                   if isinstance(prompt, Prompt) and prompt.media is not None and not prompt.items]  # fmt: skip

        def add(index: int) -> None:
            prompt = prompts[index]
            assert isinstance(prompt, Prompt)
            try:
                self._with_images().add(prompt)
            except LlmpyError as error:
                prompts[index] = at(error, index)
            except TypeError as error:
                raise TypeError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None

        if len(waiting) < 2:
            for index in waiting:
                add(index)
            return
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(len(waiting), len(os.sched_getaffinity(0)), _IMAGE_THREADS)) as pool:
            for _ in pool.map(add, waiting):
                pass

    def _with_images(self) -> Images:
        """What prepares images, or UnsupportedError."""
        if self.images is None:
            raise UnsupportedError(
                f"prompts with images: {self._name} has no tower for images; load a model of a family that has one "
                "(without limit_mm_per_prompt={'image': 0}), or leave the images out"
            )
        return self.images

    @property
    def image_placeholder(self) -> str | None:
        """What stands for an image in a text; None: the model takes no images."""
        return None if self.images is None else self.images.writer.placeholder

    def _can_fit(self, prompt: Prompt) -> bool:
        """Whether to tokenise a text. If not, the prompt keeps the reason, and `check_length` raises it."""
        try:
            self.check_text(prompt.expanded or prompt.text or "")
        except InvalidRequestError as error:
            prompt.error = error
        return prompt.error is None

    def check_text(self, text: str, by_length: bool = False) -> None:
        """Refuses text that cannot be tokenised, or that is too long, before it is tokenised.

        Args:
            text: The text of a prompt.
            by_length: Check only the length of the text, which takes no time.

        Raises:
            InvalidRequestError: There is no tokenizer; or the text surely has more than `max_model_len` tokens.
        """
        if self.tokenizer is None:
            message = "a text prompt needs a tokenizer; skip_tokenizer_init is True: pass token ids"
            raise InvalidRequestError(message, parameter="prompt")
        check_text(self.tokenizer, text, self.max_model_len, by_length)

    def _tokenize(self, prompts: list[Prompt], special_tokens: bool) -> None:
        assert self.tokenizer is not None
        texts = [prompt.expanded or prompt.text or "" for prompt in prompts]
        encoded = self.tokenizer.encode_batch(texts, special_tokens)
        bos = self.tokenizer.bos_token_id
        for prompt, found in zip(prompts, encoded, strict=True):
            ids = self._with_images().writer.arranged(found, bos) if prompt.items and special_tokens else found
            prompt.ids = parse_ids(ids)
            if prompt.items:
                try:
                    self._with_images().place(prompt)
                except InvalidRequestError as error:
                    prompt.error = error
            if special_tokens and not self._warned_of_bos and bos is not None and list(ids[:2]) == [bos, bos]:
                self._warned_of_bos = True
                warnings.warn(
                    f"the prompt begins with {self.tokenizer.bos_token} and the tokenizer adds one more; both stay. "
                    "Leave it out, or pass tokenization_kwargs={'add_special_tokens': False}",
                    stacklevel=4,
                )

    def check_length(self, prompt: Prompt, room: int = 1) -> None:
        """Refuses a prompt that is empty, is too long, or has ids outside the vocabulary."""
        ids, prior = prompt.ids, prompt.prior
        if prompt.error is not None:
            raise prompt.error
        if ids is None or len(ids) == 0:
            raise InvalidRequestError("The prompt cannot be empty", parameter="prompt", value=prompt.text)
        length = len(ids) + (0 if prior is None else len(prior))
        most, advice = self.max_model_len, "Shorten it, or raise max_model_len."
        if length > self.max_model_len:
            raise too_long(f"length {length}", length, most)
        if room and length == self.max_model_len and prior is None:
            raise InvalidRequestError(
                f"The prompt (length {length}) plus the number of requested output tokens (at least 1) "
                f"is longer than the maximum model length of {most}. {advice}",
                parameter="prompt",
                value=length,
            )
        if prompt.room is not None and length + prompt.room[1] > most:
            name, wanted = prompt.room
            raise InvalidRequestError(
                f"{name} is {wanted} and the prompt has {length} tokens, together more than the maximum model length of "
                f"{most}. Lower {name} to at most {most - length}, or raise max_model_len.",
                parameter=name,
                value=wanted,
            )
        for part in (ids, prior):
            if part is not None and len(part) and int(part.max()) >= self.vocab_size:
                wrong = int(part[part >= self.vocab_size][0])
                raise InvalidRequestError(
                    f"Token id {wrong} is out of vocabulary (size {self.vocab_size})",
                    parameter="prompt_token_ids",
                    value=wrong,
                )

    def next_seed(self) -> tuple[int, int]:
        """Ordinal of the next request, and the seed that it gets if it has none."""
        ordinal = next(self._ordinals)
        return ordinal, mix(self._root, ordinal)

    def check(self, prompt: Prompt, params: SamplingParams, priority: int = 0) -> None:
        """Checks a prompt and its parameters against the model."""
        self.check_ids(prompt, params)
        self.check_params(prompt, params, priority)

    def check_ids(self, prompt: Prompt, params: SamplingParams) -> None:
        """Runs the checks that need the prompt's ids."""
        self.check_length(prompt)
        assert prompt.ids is not None
        if params.prompt_logprobs is not None and params.prompt_logprobs <= self.config.max_logprobs:
            self.check_size("prompt_logprobs", params.prompt_logprobs, len(prompt.ids))

    def check_params(self, prompt: Prompt, params: SamplingParams, priority: int = 0) -> None:
        """Runs the checks that do not need the prompt's ids."""
        most = self.config.max_logprobs
        for name, label in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
            count = getattr(params, name)
            if count is not None and count > most and params.search is None:
                raise InvalidRequestError(
                    f"Requested {label} logprobs of {count}, which is greater than max allowed: {most}. Raise max_logprobs.",
                    parameter=name,
                    value=count,
                )
        self._check_token_ids(params)
        for name in ("stop", "bad_words", "structured_outputs"):
            if self.tokenizer is None and getattr(params, name):
                raise InvalidRequestError(f"{name} needs a tokenizer; skip_tokenizer_init is True", parameter=name)
        if priority != 0 and self.config.scheduling_policy != "priority":
            raise InvalidRequestError(
                f"priority is {priority} but scheduling_policy is '{self.config.scheduling_policy}'",
                parameter="priority",
                value=priority,
            )
        if params.search is not None and params.stop_strings and not self.translator.core_matches_stops(params):
            raise UnsupportedError("beam search: stop wants a tokenizer whose tokens' texts, joined, give the text; drop it")
        if prompt.prior is not None and params.search is not None:
            raise UnsupportedError("beam search takes prompts, not output_token_ids; put the ids into the prompt")
        if prompt.prior is not None and params.n != 1:
            raise InvalidRequestError(f"n must be 1 with output_token_ids, got {params.n}.", parameter="n", value=params.n)

    def check_size(self, name: str, count: int, tokens: int) -> None:
        """Refuses prompt logprobs that would take too much memory."""
        size = tokens * (count + 1) * 12
        if size > MAX_PROMPT_LOGPROBS_BYTES:
            raise InvalidRequestError(
                f"{name}={count} for {tokens} tokens would take {size} bytes, more than 1 GiB; ask for fewer",
                parameter=name,
                value=count,
            )

    def _check_token_ids(self, params: SamplingParams) -> None:
        size = self.vocab_size
        outside = [token for token in params.logit_bias or () if not 0 <= token < size]
        if outside:
            raise InvalidRequestError(
                f"token_id(s) {outside} in logit_bias contain out-of-vocab token ids. Vocabulary size: {size}",
                parameter="logit_bias",
                value=outside,
            )
        outside = [token for token in params.allowed_token_ids or () if not 0 <= token < size]
        if outside:
            raise InvalidRequestError(
                f"allowed_token_ids contains out-of-vocab token id! {outside[0]} is not below {size}",
                parameter="allowed_token_ids",
                value=outside[0],
            )


def check_text(tokenizer: Tokenizer, text: str, max_model_len: int, by_length: bool = False) -> None:
    """Refuses a text that certainly has more tokens than the model takes.

    Args:
        tokenizer: The model's tokenizer.
        text: The text.
        max_model_len: Most tokens.
        by_length: Check only the length of the text, which takes no time; else part of it may be tokenised.

    Raises:
        InvalidRequestError: The text has more tokens.
    """
    from ..text.bounds import USUAL_CHARS, exceeds_by_length, surely_exceeds, text_bytes

    if len(text) <= USUAL_CHARS * max_model_len:
        return
    if (exceeds_by_length if by_length else surely_exceeds)(tokenizer, text, max_model_len):
        size = text_bytes(text)
        raise too_long(f"{size} bytes of text", size, max_model_len)


def too_long(length: str, value: int, max_model_len: int) -> InvalidRequestError:
    """The error of a prompt that is longer than `max_model_len`.

    Args:
        length: The prompt's length in words, such as "10 tokens".
        value: The number in `length`.
        max_model_len: Most tokens.
    """
    message = f"The prompt ({length}) is longer than the maximum model length of {max_model_len}."
    return InvalidRequestError(f"{message} Shorten it, or raise max_model_len.", parameter="prompt", value=value)


def at(error: LlmpyError, index: int) -> LlmpyError:
    """The error with its prompt's index in the message."""
    if isinstance(error, InvalidRequestError):
        error.index = index
    return error


def special_tokens_wanted(tokenization_kwargs: Mapping[str, object] | None, default: bool) -> bool:
    """`add_special_tokens` of tokenization_kwargs; other keys are refused."""
    for name in tokenization_kwargs or {}:
        if name in ("truncate_prompt_tokens", "truncation_side"):
            raise UnsupportedError(f"tokenization_kwargs[{name!r}] is not supported yet; cut the ids yourself")
        if name != "add_special_tokens":
            raise TypeError(f"unknown key {name!r} in tokenization_kwargs; known is add_special_tokens")
    return as_bool("add_special_tokens", (tokenization_kwargs or {}).get("add_special_tokens", default))


def mix(root: int, ordinal: int) -> int:
    """A seed of 64 bits from the engine's seed and a request's ordinal (the finaliser of splitmix64, twice)."""
    value = root
    for number in (ordinal, 0x9E3779B97F4A7C15):
        value = (value + number + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        value ^= value >> 31
    return value
