"""The tokenizer of a model: text to ids and back, and chat templates. Names and defaults are those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, overload

from ..checks import lone_surrogate
from ..errors import InvalidRequestError, UnsupportedError

if TYPE_CHECKING:
    from .. import _core
    from ..hub import ModelFiles
    from .chat import Message
    from .token_texts import TokenTexts

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT_TEMPLATE = "default"


class TemplateText(str):
    """A chat template of a checkpoint; `file` is its file, for error messages."""

    file: str

    def __new__(cls, text: str, file: object) -> TemplateText:
        found = super().__new__(cls, text)
        found.file = str(file)
        return found


class Encoding(Protocol):
    """Ids of a text, and the character span of each id."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def offsets(self) -> list[tuple[int, int]]: ...


class Backend(Protocol):
    """The methods that a Tokenizer needs: those of a tokenizers.Tokenizer."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Encoding: ...
    def encode_batch(self, input: list[str], *, add_special_tokens: bool = True) -> Sequence[Encoding]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def id_to_token(self, id: int) -> str | None: ...
    def token_to_id(self, token: str) -> int | None: ...
    def get_vocab_size(self, with_added_tokens: bool = True) -> int: ...
    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]: ...


@contextmanager
def _unicode(texts: Sequence[str]) -> Iterator[None]:
    """Wraps the encoding of texts: converts a backend's TypeError about a lone surrogate to a clear error."""
    try:
        yield
    except TypeError:
        for text in texts:
            start = lone_surrogate(text) if isinstance(text, str) else None
            if start is not None:
                message = f"text: wanted Unicode text, have a lone surrogate at {start}"
                raise InvalidRequestError(message, parameter="text", value=text) from None
        raise


class Tokenizer:
    """Text to token ids and back.

    Args:
        backend: The tokenizer that encodes and decodes.
        texts: Text bytes of every id; None if decoding does more than join bytes.
        special_ids: Ids that `skip_special_tokens` hides.
        named: Special tokens by role: "bos_token", "eos_token", ...
        eos_token_ids: Ids that end a sequence, from all sources.
        templates: Chat templates by name; `chat_template` is the one named "default".
    """

    def __init__(
        self,
        backend: Backend,
        texts: TokenTexts | None,
        special_ids: Iterable[int],
        named: Mapping[str, str],
        eos_token_ids: Iterable[int],
        templates: Mapping[str, str],
    ) -> None:
        self._backend = backend
        self.texts = texts
        self.special_ids: list[int] = sorted(special_ids)
        self.eos_token_ids: list[int] = list(dict.fromkeys(eos_token_ids))
        self._named = dict(named)
        self.chat_templates: dict[str, str] = dict(templates)

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def __repr__(self) -> str:
        return f"Tokenizer({len(self)} tokens, {type(self._backend).__name__}, eos {self.eos_token_ids})"

    @property
    def backend(self) -> Any:
        """The object that encodes and decodes: usually a `tokenizers.Tokenizer`."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        """Number of tokens without added ones, as in transformers; `len(tokenizer)` counts them too."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    @cached_property
    def max_token_id(self) -> int:
        """The largest id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def special_tokens(self) -> list[str]:
        """Texts of the tokens that `skip_special_tokens` hides."""
        return list(self.special_by_name)

    @cached_property
    def special_by_name(self) -> dict[str, int]:
        """Ids of the tokens that `skip_special_tokens` hides, by their texts."""
        named = ((self._backend.id_to_token(token), token) for token in self.special_ids)
        return {name: token for name, token in named if name}

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Special tokens by role; chat templates see them as variables."""
        return dict(self._named)

    @property
    def bos_token(self) -> str | None:
        """Text of the token that begins a sequence."""
        return self._named.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a sequence."""
        return self._id_of("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the tokenizer's end-of-sequence token."""
        return self._named.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the tokenizer's end-of-sequence token; `eos_token_ids` has all such ids."""
        return self._id_of("eos_token")

    @property
    def pad_token(self) -> str | None:
        """Text of the padding token."""
        return self._named.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token."""
        return self._id_of("pad_token")

    @property
    def chat_template(self) -> str | None:
        """Jinja text of the default chat template."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def _id_of(self, role: str) -> int | None:
        name = self._named.get(role)
        return None if name is None else self._backend.token_to_id(name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text.

        Args:
            text: Any text; special tokens in it become their ids.
            add_special_tokens: Add BOS and EOS if the model's tokenizer adds them.

        Returns:
            The ids.

        Raises:
            InvalidRequestError: The text has a lone surrogate; the other methods that encode raise it, too.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Ids of two texts, with special tokens around and between them, for cross-encoders.

        Args:
            first, second: The texts.

        Returns:
            The ids, and the type of each id: 0, or 1 for ids of the second text if the tokenizer distinguishes them.

            Raises:
                UnsupportedError: The tokenizer does not support pairs.
        """
        if not hasattr(self._backend, "post_processor"):
            raise UnsupportedError(f"{type(self._backend).__name__} encodes no pairs of texts")
        with _unicode((first, second)):
            encoding = self.backend.encode_batch([(first, second)])[0]
        return encoding.ids, encoding.type_ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of several texts; `encode` of each."""
        return [encoding.ids for encoding in self._encodings(texts, add_special_tokens)]

    def _encodings(self, texts: Sequence[str], add_special_tokens: bool) -> Sequence[Encoding]:
        """Encodings without offsets, because offsets take most of the time for a long text. Releases the GIL."""
        run = getattr(self._backend, "encode_batch_fast", self._backend.encode_batch)
        with _unicode(texts):
            found: Sequence[Encoding] = run(list(texts), add_special_tokens=add_special_tokens)
        return found

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        """An encoding with offsets. It calls `encode_batch`, because the backend's `encode` would hold the GIL."""
        with _unicode((text,)):
            return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def count(self, text: str) -> int:
        """Number of tokens of a text, without special tokens around it."""
        return len(self._encodings([text], False)[0].ids)

    @cached_property
    def max_token_bytes(self) -> int | None:
        """Most bytes of text that one token can represent; None: no bound, because the tokenizer drops some text."""
        from .bounds import max_token_bytes

        return max_token_bytes(self)

    def encode_with_ends(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[int]]:
        """Ids of a text, and the number of characters of the text up to the end of each id."""
        encoding = self._encoding(text, add_special_tokens)
        return encoding.ids, [end for _, end in encoding.offsets]

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """Ids and attention mask of a text or of several; the mask is all ones, because there is no padding."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        batch = self.encode_batch(text, add_special_tokens)
        return {"input_ids": batch, "attention_mask": [[1] * len(ids) for ids in batch]}

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of ids.

        Args:
            ids: One id or several; unknown ids add nothing.
            skip_special_tokens: Leave special tokens out.

        Returns:
            The text; invalid UTF-8 becomes U+FFFD.
        """
        listed = _as_ids(ids)
        if self.texts is not None:
            return self.texts.decode(listed, skip_special_tokens)
        known = [token for token in listed if token >= 0 and self._backend.id_to_token(token) is not None]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        """Texts of several sequences of ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def token_bytes(self) -> list[bytes] | None:
        """Text bytes of every id, including special tokens; None if decoding does more than join bytes."""
        return None if self.texts is None else self.texts.table

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str | None]: ...
    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> str | list[str | None] | None:
        """Vocabulary entries of ids; None for an unknown id."""
        names = [None if token < 0 else self._backend.id_to_token(token) for token in _as_ids(ids)]
        return names if isinstance(ids, Iterable) else names[0]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...  # type: ignore[overload-overlap]
    @overload
    def convert_tokens_to_ids(self, tokens: Iterable[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> int | list[int | None] | None:
        """Ids of vocabulary entries; for an unknown entry the id of the unknown token, or None."""
        unknown = self._id_of("unk_token")
        names = [tokens] if isinstance(tokens, str) else list(tokens)
        found = [self._backend.token_to_id(name) for name in names]
        ids = [unknown if token is None else token for token in found]
        return ids[0] if isinstance(tokens, str) else ids

    def get_vocab(self) -> dict[str, int]:
        """Ids by vocabulary entry, added tokens included."""
        return self._backend.get_vocab(with_added_tokens=True)

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tokenize: Literal[False],
        return_assistant_tokens_mask: Literal[False] = ...,
        **options: Any,
    ) -> str: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tokenize: Literal[True] = ...,
        return_assistant_tokens_mask: Literal[False] = ...,
        **options: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], *, tokenize: bool = ..., **options: Any
    ) -> Any: ...

    def apply_chat_template(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        chat_template: str | None = None,
        return_assistant_tokens_mask: bool = False,
        **kwargs: object,
    ) -> Any:
        """Renders a conversation, or several, with the model's chat template.

        Args:
            messages: Dicts with "role" and "content"; or a sequence of such conversations.
            tokenize: True: ids; False: text.
            add_generation_prompt: Open the assistant's next message.
            continue_final_message: Leave the last message open; a str: leave this field of it open.
            tools: JSON schemas of functions that the model may call.
            documents: Documents with "title" and "text".
            chat_template: Jinja text, or a name in `chat_templates`; None = the default.
            return_assistant_tokens_mask: Also return a mask: 1 for tokens inside the template's generation blocks, else 0.
            **kwargs: Further variables of the template.

        Returns:
            A list of ids or a text; with the mask, a pair of ids and mask; for several conversations, a list of these.

            Raises:
                ChatTemplateError: There is no template, or it refuses the messages.
                InvalidRequestError: Options exclude each other.
        """
        from . import chat

        options = chat.Options(
            template=chat.choose(self.chat_templates, chat_template, tools is not None),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            mask=return_assistant_tokens_mask,
            variables={**self._named, **kwargs},
        )
        if messages and not isinstance(messages[0], Mapping) and isinstance(messages[0], Sequence):
            many = cast("Sequence[Sequence[Message]]", messages)
            return [self._render(one, options, tokenize) for one in many]
        return self._render(cast("Sequence[Message]", messages), options, tokenize)

    def _render(self, messages: Sequence[Message], options: Any, tokenize: bool) -> Any:
        """Renders one conversation to ids or text; with the mask, to a pair."""
        from . import chat

        text, spans = chat.render(messages, options)
        if not tokenize:
            if not options.mask:
                return text
            return text, [int(any(start <= place < end for start, end in spans)) for place in range(len(text))]
        if not options.mask:
            return self.encode(text, add_special_tokens=False)
        encoding = self._encoding(text, False)
        return encoding.ids, chat.token_mask(encoding.offsets, spans)


def _as_ids(ids: int | Iterable[int]) -> list[int]:
    """A list of plain ints from one id, several, or an array."""
    if isinstance(ids, Iterable):
        to_list: Callable[[], list[int]] | None = getattr(ids, "tolist", None)
        return to_list() if to_list is not None else [int(token) for token in ids]
    return [int(ids)]


def load_tokenizer(
    files: ModelFiles, checkpoint: _core.Checkpoint | None = None, chat_template: str | None = None
) -> Tokenizer:
    """Loads the tokenizer of a model.

    Args:
        files: The model's files.
        checkpoint: The opened GGUF file with the tokenizer in its metadata; not needed for a Hugging Face directory.
        chat_template: Jinja text that replaces the model's own default template.

    Returns:
        The tokenizer.

    Raises:
        CheckpointError: A file is damaged or contradicts itself.
        UnsupportedError: There is no tokenizer.json, or the kind of GGUF vocabulary is unknown.
    """
    if files.kind == "gguf":
        from .gguf_tokenizer import from_metadata

        assert checkpoint is not None
        tokenizer = from_metadata(checkpoint.metadata, str(files.weights[0]))
    else:
        from .tokenizer_files import from_directory

        assert files.directory is not None
        tokenizer = from_directory(files.directory, files.config, files.generation_config)
    if chat_template is not None:
        tokenizer.chat_templates[DEFAULT_TEMPLATE] = chat_template
    return tokenizer
