"""Chat templates: render conversations to text, byte for byte as transformers does. Templates are untrusted code."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension

from ..checks import lone_surrogate
from ..errors import ChatTemplateError, InvalidRequestError, UnsupportedError
from .chat_images import PLACE
from .sandbox import DEFAULT_LIMITS, MAX_TEMPLATE, METER, Environment, Limits, Meter, TemplateLimitError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.parser import Parser

Message = Mapping[str, Any]
Span = tuple[int, int]

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
END_MARK = "CONTINUE_FINAL_MESSAGE_HERE "  # ends with a space to detect a template that strips it
PROBE = "PROBE OF CONTENT PARTS"
MAX_MESSAGE = 1000  # most characters of a template's error text

_marks: ContextVar[tuple[str, str] | None] = ContextVar("marks", default=None)
_limits: ContextVar[Limits | None] = ContextVar("limits", default=None)


@dataclass(frozen=True)
class Options:
    """Options of rendering.

    Args:
        template: Jinja text.
        add_generation_prompt: Open the assistant's next message.
        continue_final_message: Leave the last message open; a str names the field to continue.
        tools: JSON schemas of functions.
        documents: Documents with "title" and "text".
        mask: Find the text from generation blocks.
        variables: Further variables of the template, including the special tokens.
        limits: Limits of the rendering; give a template from a request less than the default.
    """

    template: str
    add_generation_prompt: bool = False
    continue_final_message: bool | str = False
    tools: Sequence[Mapping[str, object]] | None = None
    documents: Sequence[Mapping[str, object]] | None = None
    mask: bool = False
    variables: Mapping[str, object] | None = None
    limits: Limits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "Cannot set both `add_generation_prompt` and `continue_final_message` to True.",
                parameter="continue_final_message",
                value=self.continue_final_message,
            )
        if self.continue_final_message and self.mask:
            raise InvalidRequestError(
                "Cannot set both `continue_final_message` and `return_assistant_tokens_mask` to True.",
                parameter="return_assistant_tokens_mask",
                value=True,
            )
        for tool in self.tools or ():
            if not isinstance(tool, Mapping):
                raise UnsupportedError(f"tools: wanted JSON schemas as dicts, have {type(tool).__name__}")


def choose(templates: Mapping[str, str], given: str | None, has_tools: bool) -> str:
    """The template to use: the given text or name, the one for tools, or the default."""
    if given is not None:
        return templates.get(given, given)
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    names = f"; it has those named {', '.join(sorted(templates))}, name one" if templates else ""
    raise ChatTemplateError(
        f"the model has no chat template{names}; chat_template, or generate() with a text prompt",
        parameter="chat_template",
    )


def conversation(messages: str | Sequence[Message], template: str, placeholder: str | None = None) -> list[Message]:
    """Converts messages to the form that the template reads.

    Args:
        messages: A conversation; a str means one user message. Images have been taken out of it (chat_images.py).
        template: Jinja text that will render the messages.
        placeholder: What stands for an image in a text; None: images are refused.

    Returns:
        The messages; lists of text parts are joined by newlines unless the template reads parts. If it does not read images,
        their placeholders stand in front of the text, one a line.

    Raises:
        UnsupportedError: A content part is not text.
        TypeError: A message is not a dict.
    """
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [_with_text(message, template, placeholder) for message in messages]


def _with_text(message: Message, template: str, placeholder: str | None) -> Message:
    """A message with text, and places of images, as content; refuses other parts."""
    if not isinstance(message, Mapping):
        raise TypeError(f"messages must be dicts with 'role' and 'content', got {type(message).__name__}")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise TypeError(f"content must be a str, None or a list of parts, got {type(content).__name__}")
    parts: list[str | None] = []  # None: an image
    for part in content:
        kind = "text" if isinstance(part, str) else part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" and (kind != "image" or placeholder is None):
            raise UnsupportedError(f"content part of type '{kind}'")
        parts.append(None if kind == "image" else part if isinstance(part, str) else str(part.get("text", "")))
    if None in parts and placeholder is not None and not reads_images(template):
        _say_in_front(template, placeholder)
        places = [placeholder] * parts.count(None)
        return {**message, "content": "\n".join([*places, *(text for text in parts if text is not None)])}
    if None in parts or reads_parts(template):
        return {**message, "content": [PLACE if text is None else {"type": "text", "text": text} for text in parts]}
    return {**message, "content": "\n".join(text for text in parts if text is not None)}


@lru_cache(maxsize=32)
def _say_in_front(template: str, placeholder: str) -> None:
    """Warns once that a template reads no images."""
    warnings.warn(
        f"the chat template that begins {template[:40]!r} does not read images: {placeholder!r} stands in front of the text of "
        "a message, one line for each image; give a chat_template that does",
        stacklevel=2,
    )


def with_content(messages: Sequence[Message]) -> list[Message]:
    """Checks that all messages have content; a message with tool calls but no content gets an empty text.

    Raises:
        InvalidRequestError: Another message has no content and no reasoning.
    """
    made = []
    for index, message in enumerate(messages):
        has_content = not isinstance(message, Mapping) or message.get("content") is not None
        if not has_content and message.get("tool_calls"):
            message = {**message, "content": ""}
        elif not has_content and not any(message.get(name) for name in REASONING_FIELDS):
            role = message.get("role")
            reason = f"messages[{index}] (role {role!r}) has no content; give it text, or leave the message out"
            raise InvalidRequestError(reason, parameter="messages", value=message)
        made.append(message)
    return made


def check_reads(template: str, given: Mapping[str, object]) -> None:
    """Refuses tools and documents if the template does not read them.

    Args:
        template: Jinja text.
        given: Arguments of rendering, by name.

    Raises:
        UnsupportedError: The template does not read given tools or documents.
    """
    for name in ("tools", "documents"):
        if given.get(name) and not reads(template, name):
            raise UnsupportedError(
                f"{name}: the chat template that begins {template[:40]!r} does not read {name}; "
                f"give a chat_template that does, or leave {name} out"
            )


def reads(template: str, name: str) -> bool:
    """Whether a template mentions a variable. True for one that does not compile: rendering will report the error."""
    names = _variables(template)
    return names is None or name in names


@lru_cache(maxsize=32)
def _variables(template: str) -> frozenset[str] | None:
    """The names in a template; None: it does not compile."""
    try:
        return frozenset(node.name for node in _environment().parse(template).find_all(nodes.Name))
    except TemplateError:
        return None


@lru_cache(maxsize=32)
def reads_parts(template: str) -> bool:
    """Whether a template reads the text in a list of content parts; found by rendering a probe."""
    parts = [{"role": "user", "content": [{"type": "text", "text": PROBE}]}]
    try:
        text, _ = render(parts, Options(template))
    except ChatTemplateError:
        return False
    return PROBE in text and not re.search(r"""['"]type['"]\s*:\s*['"]text""", text)


@lru_cache(maxsize=32)
def reads_images(template: str) -> bool:
    """Whether a template reads an image in a list of content parts; found by rendering a probe."""
    if not reads_parts(template):
        return False
    text = {"type": "text", "text": PROBE}
    try:
        without, found = (render([{"role": "user", "content": [*more, text]}], Options(template))[0] for more in ((), (PLACE,)))
    except ChatTemplateError:
        return False
    return without != found and PROBE in found


def render(messages: Sequence[Message], options: Options) -> tuple[str, list[Span]]:
    """Renders one conversation.

    Args:
        messages: The conversation, one dict each.
        options: The template and its arguments.

        Returns:
            The text, and the character spans of generation blocks ([] unless `mask`).

    Raises:
        ChatTemplateError: The template does not compile, raises, exceeds its limits or drops the message to continue.
        InvalidRequestError: Messages are nested too deeply, or the text is not Unicode.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages must be a list of dicts, got {type(messages).__name__}")
    if not messages:
        raise ChatTemplateError("the conversation is empty; give at least one message", parameter="messages", value=[])
    try:
        plain = [_message(message) for message in messages]
        field = _mark_end(plain, options) if options.continue_final_message else ""
        text, spans = _run(plain, options)
    except RecursionError:
        raise InvalidRequestError("messages: lists and dicts are nested too deeply", parameter="messages") from None
    _check_unicode(text)
    return (_cut(text, field), spans) if options.continue_final_message else (text, spans)


def _check_unicode(text: str) -> None:
    """Refuses a text with a lone surrogate; tokenizers cannot encode it."""
    start = lone_surrogate(text)
    if start is not None:
        message = f"messages: wanted Unicode text, have a lone surrogate at character {start} once rendered"
        raise InvalidRequestError(message, parameter="messages")


@contextmanager
def within(limits: Limits) -> Iterator[None]:
    """Renders templates within these limits inside the block; they override `Options.limits`."""
    token = _limits.set(limits)
    try:
        yield
    finally:
        _limits.reset(token)


def token_mask(offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """1 for each token with a character in one of the spans, else 0."""
    return [int(any(low < end and start < high for start, end in spans)) for low, high in offsets]


def _message(message: Message) -> dict[str, Any]:
    """A message as plain data without fields that are None; reasoning has all names that templates read."""
    if not isinstance(message, Mapping):
        raise TypeError(f"messages must be dicts with 'role' and 'content', got {type(message).__name__}")
    plain: dict[str, Any] = _plain({name: value for name, value in message.items() if value is not None})
    reasoning = next((plain[name] for name in REASONING_FIELDS if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: object) -> Any:
    """A copy in plain JSON types, so that a template cannot change or call the caller's objects."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    if isinstance(value, Mapping):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item) for item in value) if type(value) in (list, tuple) else [_plain(item) for item in value]
    for method in ("model_dump", "tolist"):  # pydantic models; NumPy scalars and arrays
        if callable(dump := getattr(value, method, None)):
            return _plain(dump())
    raise TypeError(f"chat templates take JSON data, got {type(value).__name__}")


def _mark_end(messages: list[dict[str, Any]], options: Options) -> str:
    """Marks the end of the text to continue; returns that text."""
    chosen = options.continue_final_message
    field = chosen if isinstance(chosen, str) else "content"
    last = messages[-1]
    text = last.get(field)
    if text is None:
        raise _refused(f"the final message has no '{field}' to continue")
    fields = [name for name in REASONING_FIELDS if last.get(name) == text] if field in REASONING_FIELDS else [field]
    if not any(name in options.template for name in fields):
        raise _refused(f"the template does not read '{field}'")
    if isinstance(text, list):
        part = next((part for part in reversed(text) if isinstance(part, dict) and "text" in part), None)
        if part is None:
            raise _refused("the final message has no text to continue")
        text = part["text"]
        part["text"] = text + END_MARK
    else:
        for name in fields:
            last[name] = text + END_MARK
    return str(text)


def _cut(text: str, final: str) -> str:
    """The rendered text up to the end mark."""
    bare = END_MARK.strip()
    if final.strip() not in text or bare not in text:
        raise _refused("the template drops the final message or a part of it")
    end = text.rindex(bare)
    kept = text[:end]
    return kept if text.startswith(END_MARK, end) else kept.rstrip()


def _refused(reason: str) -> ChatTemplateError:
    return ChatTemplateError(f"continue_final_message: {reason}", parameter="continue_final_message", value=True)


def _run(messages: list[dict[str, Any]], options: Options) -> tuple[str, list[Span]]:
    """Executes the template."""
    from uuid import uuid4

    mark = uuid4().hex if options.mask else ""
    marks = _marks.set((f"<{mark}>", f"</{mark}>") if mark else None)
    given = _plain(options.variables or {}) | {
        "messages": messages,
        "tools": _plain(options.tools),
        "documents": _plain(options.documents),
        "add_generation_prompt": options.add_generation_prompt,
    }
    try:
        text = _metered(options, given)
    except Exception as error:  # an untrusted template may cause any exception
        raise _failed(options.template, error) from error
    finally:
        _marks.reset(marks)
    return _take_marks(text, mark) if mark else (text, [])


def _metered(options: Options, given: dict[str, Any]) -> str:
    """Renders a template within its limits."""
    meter = Meter(_limits.get() or options.limits, given)
    outer = METER.set(meter)
    try:
        text = _compile(options.template).render(**given)
        meter.fits(len(text))
        return text
    finally:
        METER.reset(outer)


def _failed(template: str, error: Exception) -> ChatTemplateError:
    """Converts a template's failure to a ChatTemplateError."""
    kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    file = getattr(template, "file", None)
    where = "chat template" if file is None else f"{file}: chat template"
    return ChatTemplateError(f"{where}: {kind}{str(error)[:MAX_MESSAGE]}", parameter="messages")


def _take_marks(marked: str, mark: str) -> tuple[str, list[Span]]:
    """A text without its marks, and the spans between them."""
    spans: list[Span] = []
    opened: list[int] = []
    parts: list[str] = []
    length = 0
    for piece in re.split(f"(</?{mark}>)", marked):
        if piece == f"<{mark}>":
            opened.append(length)
        elif piece == f"</{mark}>":
            spans.append((opened.pop(), length))
        else:
            parts.append(piece)
            length += len(piece)
    return "".join(parts), spans


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        marks = _marks.get()
        text = caller()
        return text if marks is None else f"{marks[0]}{text}{marks[1]}"


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(pattern)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


@lru_cache(maxsize=32)
def _compile(template: str) -> Template:
    if len(template) > MAX_TEMPLATE:
        raise TemplateLimitError(f"has {len(template)} characters; at most {MAX_TEMPLATE} are allowed")
    return _environment().from_string(template)
