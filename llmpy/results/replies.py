"""Splits a chat answer into content, reasoning and tool calls, with the parsers that the server uses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..inputs import Ids
    from ..outputs import CompletionOutput
    from ..sampling_params import SamplingParams
    from ..server.dialect import Dialect
    from ..text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A function call that the model asks for.

    Args:
        id: Id of the call; the message with the result repeats it as `tool_call_id`.
        name: Name of the function.
        arguments: Arguments of the call by name.
    """

    id: str
    name: str
    arguments: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The call as in an OpenAI message, but with its arguments as a dict, which chat templates read."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The parts of a model's answer.

    Args:
        content: The text without reasoning and calls.
        reasoning: The model's reasoning before the answer; None: there is none, or the parser knows no marks of reasoning.
        tool_calls: Calls in order. A call stays in the content if its arguments are not a JSON object.
    """

    content: str
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message that continues the conversation: `messages.append(reply.message)`."""
        made: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.tool_calls:
            made["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return made


def parse_reply(dialect: Dialect, text: str, prompt: str = "", tools: Sequence[Mapping[str, Any]] | None = None) -> Reply:
    """Splits a whole answer.

    Args:
        dialect: The model's parsers.
        text: The answer, with the special tokens that the parsers look for.
        prompt: The rendered conversation; it may end inside the reasoning.
        tools: The tools that the answer may call.
    """
    import secrets

    parser = dialect.parser(prompt, tools, holds=True)
    texts: dict[str, list[str]] = {"content": [], "reasoning": []}
    calls: list[tuple[str, list[str]]] = []
    for piece in [*parser.push(text), *parser.finish()]:
        if piece.kind == "call":
            calls.append((piece.text, []))
        elif piece.kind == "arguments":
            calls[-1][1].append(piece.text)
        else:
            texts[piece.kind].append(piece.text)
    made = [
        ToolCall(id=f"call_{secrets.token_hex(12)}", name=name, arguments=json.loads("".join(parts))) for name, parts in calls
    ]
    return Reply(content="".join(texts["content"]), reasoning="".join(texts["reasoning"]) or None, tool_calls=made)


class LazyReply:
    """A reply that is parsed at the first `get` or when it is pickled.

    Args:
        make: Parses the reply.
    """

    __slots__ = ("_make", "_reply")

    def __init__(self, make: Callable[[], Reply]) -> None:
        self._make: Callable[[], Reply] | None = make
        self._reply: Reply | None = None

    def get(self) -> Reply:
        """The parsed reply."""
        if self._reply is None:
            assert self._make is not None
            self._reply, self._make = self._make(), None
        return self._reply

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.get(),)


def _restored(reply: Reply) -> LazyReply:
    """The LazyReply of an unpickled reply."""
    lazy = LazyReply(lambda: reply)
    lazy.get()
    return lazy


class ReplyReader:
    """Reads the samples of one conversation.

    Args:
        dialect: The model's parsers.
        tokenizer: The model's tokenizer.
        tools: The tools that the answers may call.
    """

    __slots__ = ("_dialect", "_tokenizer", "_tools")

    def __init__(self, dialect: Dialect, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._dialect = dialect
        self._tokenizer = tokenizer
        self._tools = tools

    def of(self, sample: CompletionOutput, prompt: str | None, prompt_ids: Ids, params: SamplingParams) -> LazyReply:
        """The reply of a sample so far."""
        hidden = self._dialect.shows_marks(bool(self._tools)) and params.skip_special_tokens
        stop = sample.stop_reason if isinstance(sample.stop_reason, str) else None
        kept = params.include_stop_str_in_output
        marked = partial(self._with_marks, prompt_ids, sample.token_ids_array, stop, kept)
        shown = marked if hidden else partial(str, sample.text)
        has_ended = sample.finish_reason == "stop" and stop is None
        return LazyReply(partial(self._read, shown, has_ended, prompt or ""))

    def _read(self, shown: Callable[[], str], has_ended: bool, prompt: str) -> Reply:
        text = shown()
        return parse_reply(self._dialect, self._dialect.without_end(text) if has_ended else text, prompt, self._tools)

    def _with_marks(self, prompt_ids: Ids, ids: Ids, stop: str | None, kept: bool) -> str:
        """The text cut at the stop string, with the special tokens that the output's text leaves out."""
        from ..text.detokenizer import Detokenizer

        text = Detokenizer(self._tokenizer, prompt_ids.tolist(), skip_special_tokens=False).push(ids.tolist(), True)
        place = -1 if stop is None else text.rfind(stop)
        return text if place < 0 else text[: place + (len(stop or "") if kept else 0)]
