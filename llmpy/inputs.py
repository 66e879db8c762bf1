"""Converts all forms of prompts to one: text or ids, prior output, salt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict

from .checks import as_int, lone_surrogate
from .errors import InvalidRequestError, LlmpyError, UnsupportedError

if TYPE_CHECKING:
    from typing import NotRequired

    import numpy as np
    import numpy.typing as npt

    from .engine.adapters import Chosen
    from .results.replies import ReplyReader
    from .vision.items import ImageItem, PlacedItem

    Ids: TypeAlias = npt.NDArray[np.int32]


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    output_token_ids: NotRequired[Sequence[int]]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, object]]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is only echoed. `token_type_ids` distinguish the two texts of a pair (BERT)."""

    prompt_token_ids: Sequence[int]
    token_type_ids: NotRequired[Sequence[int]]
    prompt: NotRequired[str]
    output_token_ids: NotRequired[Sequence[int]]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, object]]


PromptType: TypeAlias = "str | Sequence[int] | npt.NDArray[np.integer[Any]] | TextPrompt | TokensPrompt | Mapping[str, object]"
Prompts: TypeAlias = "PromptType | Iterable[PromptType]"
"""One prompt, or any iterable of prompts: a list, a generator, a column of a table, an array of texts."""

_MEDIA = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
_KEYS = ("prompt", "prompt_token_ids", "token_type_ids", "output_token_ids", "cache_salt", *_MEDIA)
_LATER = ("prompt_embeds", "encoder_prompt")
_MESSAGES = "a prompt is text or token ids, but this is a message with a role; call chat() for messages"
_PADDED = "would include padding; pass a list of unpadded lists"


class ImageInputs(NamedTuple):
    """Images of a prompt as the caller gave them.

    Args:
        data: What `llmpy.vision.decode.decode` takes, in the order of the placeholders.
        uuids: The caller's name for each image; None: it has none.
        kwargs: mm_processor_kwargs of the prompt.
    """

    data: tuple[object, ...]
    uuids: tuple[str | None, ...]
    kwargs: Mapping[str, object]


class Prompt:
    """One prompt.

    | Attribute | Meaning |
    |---|---|
    | ids | token ids; None until the text is tokenised |
    | error | why the text cannot be tokenised |
    | room | (option, number of new tokens that must fit after the prompt) |
    | reader | parser of answers to a conversation |
    | adapter | what the request wants added to the weights |
    | media | images as given; None: there are none |
    | items | the images, ready for the tower |
    | expanded | the text with what stands for the images; None: `text` is tokenised |
    | images | the items at their places among the ids |
    """

    __slots__ = (
        "adapter", "error", "expanded", "ids", "images", "items", "media", "prior", "reader", "room", "salt", "text", "types",
    )  # fmt: skip

    def __init__(
        self, text: str | None, ids: Ids | None, prior: Ids | None = None, salt: str | None = None, types: Ids | None = None
    ) -> None:
        self.text = text
        self.ids = ids
        self.prior = prior
        self.salt = salt
        self.types = types
        self.room: tuple[str, int] | None = None
        self.reader: ReplyReader | None = None
        self.adapter: Chosen | None = None
        self.error: LlmpyError | None = None
        self.media: ImageInputs | None = None
        self.items: tuple[ImageItem, ...] = ()
        self.expanded: str | None = None
        self.images: Sequence[PlacedItem] = ()

    @property
    def num_image_tokens(self) -> int:
        """Number of tokens that stand for features of images."""
        return sum(one.item.n_tokens for one in self.images) if self.images else 0


def is_single(prompts: object) -> bool:
    """Whether this is one prompt rather than a batch."""
    if isinstance(prompts, str | Mapping):
        return True
    if hasattr(prompts, "ndim"):  # an array of numbers is one prompt
        return getattr(getattr(prompts, "dtype", None), "kind", "i") in "biufc"
    return isinstance(prompts, Sequence) and len(prompts) > 0 and _is_scalar(prompts[0])


def batch(prompts: object) -> list[object]:
    """The prompts in a call's first argument, as a list."""
    if hasattr(prompts, "columns") or hasattr(prompts, "column_names"):
        raise TypeError(f"prompts must be one column, but is a {type(prompts).__name__}; pass table['name of the column']")
    if is_single(prompts):
        return [prompts]
    if isinstance(prompts, set | frozenset):
        raise TypeError("prompts must have an order, but is a set; pass a list")
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be text, token ids, a dict or a list of these, but is of type {type(prompts).__name__}")
    found = listed(prompts)
    is_array = hasattr(prompts, "ndim")
    return [found] if found and not is_array and _is_scalar(found[0]) else found


def listed(items: Iterable[object]) -> list[Any]:
    """The items as a list; items of an array or an Arrow column become Python objects."""
    if hasattr(items, "to_pylist"):
        return list(items.to_pylist())
    plain = items.tolist() if hasattr(items, "ndim") and hasattr(items, "tolist") else items
    return list(plain)


def parse(prompt: object) -> Prompt:
    """Parses one prompt of any form."""
    if isinstance(prompt, str):
        return Prompt(_unicode(prompt), None)
    if isinstance(prompt, Mapping):
        return _parse_dict(prompt)
    return Prompt(None, parse_ids(prompt))


def _parse_dict(prompt: Mapping[str, Any]) -> Prompt:
    if "input_ids" in prompt:
        return _parse_encoding(prompt)
    if "attention_mask" in prompt:
        raise TypeError(f"a dict with 'attention_mask' {_PADDED}")
    for key in prompt:
        if key == "role":
            raise TypeError(_MESSAGES)
        if key in _LATER:
            raise UnsupportedError(f"prompts with {key!r} are not supported; pass text or token ids")
        if key not in _KEYS:
            raise TypeError(f"unknown key {key!r} in a prompt; known are {', '.join(_KEYS)}")
    text, salt, prior = prompt.get("prompt"), prompt.get("cache_salt"), prompt.get("output_token_ids")
    if not (text is None or isinstance(text, str)):
        raise TypeError(f"prompt must be a str, but is of type {type(text).__name__}")
    if not (salt is None or isinstance(salt, str)):
        raise TypeError(f"cache_salt must be a str, but is of type {type(salt).__name__}")
    ids = prompt.get("prompt_token_ids")
    if ids is None and text is None:
        raise TypeError("a prompt dict must have 'prompt' or 'prompt_token_ids'")
    if ids is None and text is not None:
        _unicode(text)
    types = prompt.get("token_type_ids")
    if types is not None and ids is None:
        raise TypeError("token_type_ids go with prompt_token_ids, one each")
    given, prior, types = (None if item is None else parse_ids(item) for item in (ids, prior, types))
    made = Prompt(text, given, prior, salt or None, types)
    made.media = _images(prompt)
    return made


def _images(prompt: Mapping[str, Any]) -> ImageInputs | None:
    """The images of a prompt dict; None: it has none."""
    data, names, kwargs = ({} if prompt.get(key) is None else prompt[key] for key in _MEDIA)
    for key, value in zip(_MEDIA, (data, names, kwargs), strict=True):
        if not isinstance(value, Mapping):
            raise TypeError(f"{key} must be a dict, but is of type {type(value).__name__}")
    for kind in (*data, *names):
        if kind in ("video", "audio", "vision_chunk"):
            raise UnsupportedError(f"prompts with {kind!r} in multi_modal_data are not supported; only 'image' is")
        if kind != "image":
            raise TypeError(f"unknown kind {kind!r} in multi_modal_data; known is 'image'")
    images = _listed(data.get("image"))
    uuids = _listed(names.get("image")) or (None,) * len(images)
    if not all(uuid is None or isinstance(uuid, str) for uuid in uuids):
        raise TypeError("multi_modal_uuids must have a str or None for each image")
    images = images or (None,) * len(uuids)
    if len(uuids) != len(images):
        message = f"multi_modal_uuids: {len(uuids)} names for {len(images)} images; give one for each, or None"
        raise InvalidRequestError(message, parameter="multi_modal_uuids", value=len(uuids))
    return ImageInputs(images, uuids, kwargs) if images else None


def _listed(value: object) -> tuple[Any, ...]:
    """Several values, or one alone."""
    if isinstance(value, list | tuple):
        return tuple(value)
    return () if value is None else (value,)


def _parse_encoding(encoding: Mapping[str, Any]) -> Prompt:
    """Parses the result of a transformers tokenizer for one text."""
    ids, mask, types = (encoding.get(key) for key in ("input_ids", "attention_mask", "token_type_ids"))
    if isinstance(ids, Sequence) and ids and not _is_scalar(ids[0]):
        raise TypeError("input_ids holds several prompts; pass encoding['input_ids'], a list of unpadded lists")
    found = parse_ids(ids)
    if mask is not None and not all(parse_ids(mask)):
        raise TypeError(f"an attention_mask with zeros {_PADDED}")
    kinds = None if types is None else parse_ids(types)
    return Prompt(None, found, types=kinds if kinds is not None and kinds.any() else None)


def _unicode(text: str) -> str:
    """Returns the text; raises if it has a lone surrogate, which tokenizers cannot encode."""
    start = lone_surrogate(text)
    if start is not None:
        message = f"prompt: wanted Unicode text, have a lone surrogate at {start}"
        raise InvalidRequestError(message, parameter="prompt", value=text)
    return text


def parse_ids(ids: object) -> Ids:
    """Token ids as a new read-only int32 array."""
    import numpy as np

    if hasattr(ids, "__array__") and not isinstance(ids, np.ndarray):
        ids = np.asarray(ids)
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1:
            raise TypeError(f"an array of {ids.ndim} dimensions {_PADDED}")
        if ids.dtype.kind not in "iu":
            raise TypeError(f"token ids must be integers, but are of type {ids.dtype}")
        low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
    elif isinstance(ids, Sequence) and not isinstance(ids, str | bytes):
        if ids and isinstance(ids[0], Mapping) and "role" in ids[0]:
            raise TypeError(_MESSAGES)
        if ids and not _is_scalar(ids[0]):
            raise TypeError(f"a prompt is a list of ints, but an id is of type {type(ids[0]).__name__}")
        if not set(map(type, ids)) <= {int}:
            ids = [as_int("a token id", item) for item in ids]
        low, high = (min(ids), max(ids)) if ids else (0, 0)
    else:
        raise TypeError(f"a prompt is text, a list of token ids or a dict, but is of type {type(ids).__name__}")
    if low < 0 or high >= 2**31:
        wrong = low if low < 0 else high
        raise InvalidRequestError(f"Token id {wrong} is out of vocabulary", parameter="prompt_token_ids", value=wrong)
    return np.frombuffer(np.array(ids, np.int32).tobytes(), np.int32)


def _is_scalar(item: object) -> bool:
    """Whether an item is a number (a valid token id or not) rather than a prompt."""
    return isinstance(item, int | float) or (getattr(item, "ndim", None) == 0)
