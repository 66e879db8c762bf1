"""`llmpy chat`: a conversation in the terminal, with a model of this process or of a running server."""

from __future__ import annotations

import contextlib
import json
import time
from argparse import Namespace
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..environment import cache_dir
from ..errors import LlmpyError
from .common import open_model, sampling
from .remote import Server, open_server
from .terminal import Terminal

if TYPE_CHECKING:
    from .. import LLM

Message = dict[str, Any]
HELP = """\
/reset          forgets the conversation
/system [TEXT]  sets the system message; alone, shows it
/stats          tokens and speed of the last answer, and of the engine
/save FILE      writes the conversation, as Markdown to a .md file, else as JSON
/help           this
A line that ends with \\ goes on in the next one; so does all between \"\"\" and \"\"\".
Ctrl-C stops an answer, Ctrl-D ends."""


@dataclass
class Answer:
    """One answer and what it took; times are seconds since it was asked for."""

    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0

    def line(self) -> str:
        """What it took."""
        speed = f", {(self.tokens - 1) / (self.last - self.first):.1f} tokens/s" if self.last > self.first else ""
        prompt = f"{self.prompt_tokens} prompt tokens, {self.cached_tokens} of them cached"
        return f"{self.tokens} tokens{speed}, first after {1e3 * self.first:.0f} ms; {prompt}"


Piece = tuple[str, bool]
"""New text, and whether it is reasoning."""


class LocalModel:
    """A model of this process.

    Args:
        llm: The engine.
        fields: Of sampling.
    """

    def __init__(self, llm: LLM, fields: dict[str, Any]) -> None:
        self._llm, self._fields = llm, fields
        self.name = llm.name

    def describe(self) -> str:
        """The engine in a line."""
        return repr(self._llm)

    def pieces(self, messages: list[Message], answer: Answer) -> Generator[Piece]:
        """An answer as it comes, counted in `answer`."""
        for chunk in self._llm.stream_chat(messages, **self._fields):
            answer.tokens += len(chunk.token_ids)
            answer.prompt_tokens = len(chunk.output.prompt_token_ids_array)
            answer.cached_tokens = chunk.output.num_cached_tokens
            yield str(chunk), False


class RemoteModel:
    """A model of a running server.

    Args:
        server: The server.
        fields: Of sampling.
    """

    def __init__(self, server: Server, fields: dict[str, Any]) -> None:
        self._server, self._fields = server, fields
        self.name = f"{server.model} at {server.url}"

    def describe(self) -> str:
        """The server in a line."""
        return self.name

    def pieces(self, messages: list[Message], answer: Answer) -> Generator[Piece]:
        """An answer as it comes, counted in `answer`."""
        asked = {**self._fields, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        for made in self._server.stream("/chat/completions", messages=messages, **asked):
            if usage := made.get("usage"):
                answer.prompt_tokens, answer.tokens = usage["prompt_tokens"], usage["completion_tokens"]
                answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            for choice in made["choices"]:
                if reasoning := choice["delta"].get("reasoning"):
                    yield reasoning, True
                yield choice["delta"].get("content") or "", False


class Talk:
    """A conversation.

    Args:
        model: Who answers.
        terminal: Where.
        system: The system message, or None.
    """

    def __init__(self, model: LocalModel | RemoteModel, terminal: Terminal, system: str | None) -> None:
        self._model, self._terminal, self._system = model, terminal, system
        self._said: list[Message] = []
        self._last: Answer | None = None

    def run(self) -> None:
        """Until the end of input."""
        if self._terminal.is_interactive:
            self._terminal.note(f"{self._model.name}: /help tells what can be done, Ctrl-D ends")
        while True:
            try:
                self._turn()
            except EOFError:
                if self._terminal.is_interactive:
                    print()
                return
            except KeyboardInterrupt:
                if not self._terminal.is_interactive:
                    raise
                print()

    def _turn(self) -> None:
        text = self._terminal.read()
        if text.startswith("/"):
            self._command(text)
        elif text.strip():
            self._answer(text)

    def _messages(self) -> list[Message]:
        return ([{"role": "system", "content": self._system}] if self._system else []) + self._said

    def _answer(self, text: str) -> None:
        """Asks and shows the answer; what came before Ctrl-C stays said."""
        self._said.append({"role": "user", "content": text})
        answer = self._last = Answer()
        try:
            self._show(answer)
        except KeyboardInterrupt:
            if not self._terminal.is_interactive:
                raise
            self._terminal.show(" [stopped]", dim=True)
        except (LlmpyError, OSError) as error:
            if not self._terminal.is_interactive:
                raise
            self._terminal.problem(str(error))
        print()
        if answer.text:
            self._said.append({"role": "assistant", "content": answer.text})
        else:
            self._said.pop()

    def _show(self, answer: Answer) -> None:
        began, was_reasoning = time.perf_counter(), False
        with contextlib.closing(self._model.pieces(self._messages(), answer)) as pieces:
            for piece, is_reasoning in pieces:
                answer.last = time.perf_counter() - began
                answer.first = answer.first or answer.last
                if was_reasoning and not is_reasoning and piece:
                    print("\n")
                self._terminal.show(piece, dim=is_reasoning)
                was_reasoning = is_reasoning or (was_reasoning and not piece)
                answer.text += "" if is_reasoning else piece

    # ---- commands ---------------------------------------------------------------------------------------------------

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        known = COMMANDS.get(name)
        if known is None:
            self._terminal.problem(f"{name}: no such command; there are {', '.join(COMMANDS)}")
        else:
            known(self, rest.strip())

    def _reset(self, rest: str) -> None:
        self._said.clear()
        self._terminal.note("forgotten")

    def _set_system(self, rest: str) -> None:
        self._system = rest or self._system
        self._terminal.note(f"system message: {self._system or 'none'}")

    def _stats(self, rest: str) -> None:
        if self._last is not None:
            self._terminal.note(self._last.line())
        self._terminal.note(self._model.describe())

    def _save(self, rest: str) -> None:
        if not rest:
            self._terminal.problem("/save: wanted the name of a file")
            return
        try:
            Path(rest).expanduser().write_text(self._written(rest.endswith(".md")), encoding="utf-8")
        except OSError as error:
            self._terminal.problem(f"/save: {error}")
        else:
            self._terminal.note(f"{len(self._messages())} messages written to {rest}")

    def _written(self, is_markdown: bool) -> str:
        if is_markdown:
            return "".join(f"**{message['role']}**\n\n{message['content']}\n\n" for message in self._messages())
        return json.dumps(self._messages(), ensure_ascii=False, indent=2) + "\n"

    def _help(self, rest: str) -> None:
        self._terminal.note(HELP)


COMMANDS: dict[str, Callable[[Talk, str], None]] = {
    "/reset": Talk._reset,
    "/system": Talk._set_system,
    "/stats": Talk._stats,
    "/save": Talk._save,
    "/help": Talk._help,
}


def run(chosen: Namespace) -> int:
    """Talks until the end of input."""
    with contextlib.ExitStack() as stack:
        model: LocalModel | RemoteModel
        if chosen.url is None:
            model = LocalModel(stack.enter_context(open_model(chosen)), sampling(chosen))
        else:
            model = RemoteModel(open_server(chosen), sampling(chosen))
        terminal = stack.enter_context(Terminal(cache_dir() / "chat_history", tuple(COMMANDS)))
        Talk(model, terminal, chosen.system).run()
    return 0
