"""`llmpy chat`: a conversation in the terminal with a model in this process or of a running server."""

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
from ..errors import ConfigError, LlmpyError
from ..text.chat_window import fitted, prompt_room
from .common import open_model, sampling
from .remote import Server, open_server
from .terminal import Terminal, keeping_typed_lines

if TYPE_CHECKING:
    from .. import LLM

Message = dict[str, Any]
HELP = """\
/reset          forgets the conversation
/retry          asks the last question again
/undo           forgets the last question and its answer
/set NAME VALUE sets temperature, max_tokens and so on; without VALUE back to the default; alone, shows them
/system [TEXT]  sets the system message; alone, shows it
/stats          tokens and speed of the last answer, and of the engine
/save FILE      writes the conversation, as Markdown to a .md file, else as JSON
/load FILE      goes on with a conversation in JSON, as /save wrote it
/help           this
A line that ends with \\ goes on in the next one; so does all between \"\"\" and \"\"\".
Ctrl-C stops an answer, Ctrl-D ends. When the conversation outgrows the context, its oldest turns are left out."""


@dataclass
class Answer:
    """Statistics of one answer; times are seconds since the question."""

    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    dropped: int = 0
    """Number of messages that did not fit the context."""
    first: float = 0.0
    last: float = 0.0

    def line(self) -> str:
        """The statistics in one line."""
        speed = f", {(self.tokens - 1) / (self.last - self.first):.1f} tokens/s" if self.last > self.first else ""
        prompt = f"{self.prompt_tokens} prompt tokens, {self.cached_tokens} of them cached"
        return f"{self.tokens} tokens{speed}, first after {1e3 * self.first:.0f} ms; {prompt}"


Piece = tuple[str, bool]
"""New text, and whether it is reasoning."""


class LocalModel:
    """A model in this process.

    Args:
        llm: The engine.
        fields: Sampling fields.
    """

    def __init__(self, llm: LLM, fields: dict[str, Any]) -> None:
        self._llm, self.fields = llm, fields
        self.name = llm.name

    def describe(self) -> str:
        """The engine in one line."""
        return repr(self._llm)

    def pieces(self, messages: list[Message], answer: Answer) -> Generator[Piece]:
        """An answer as it comes, counted in `answer`."""
        length = self._llm.config.max_model_len
        assert isinstance(length, int)
        kept = fitted(messages, self._count, prompt_room(length, self.fields.get("max_tokens")))
        answer.dropped = len(messages) - len(kept)
        for chunk in self._llm.stream_chat(kept, **self.fields):
            answer.tokens += len(chunk.token_ids)
            answer.prompt_tokens = len(chunk.output.prompt_token_ids_array)
            answer.cached_tokens = chunk.output.num_cached_tokens
            yield str(chunk), False

    def _count(self, messages: list[Message]) -> int:
        return len(self._llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True))


class RemoteModel:
    """A model of a running server.

    Args:
        server: The server.
        fields: Sampling fields.
    """

    def __init__(self, server: Server, fields: dict[str, Any]) -> None:
        self._server, self.fields = server, fields
        self.name = f"{server.model} at {server.url}"

    def describe(self) -> str:
        """The server in one line."""
        return self.name

    def pieces(self, messages: list[Message], answer: Answer) -> Generator[Piece]:
        """An answer as it comes, counted in `answer`."""
        asked = {**self.fields, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        if self._server.is_llmpy:
            asked["truncation"] = "auto"
        for made in self._server.stream("/chat/completions", messages=messages, **asked):
            answer.dropped = self._server.dropped
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
        model: The model that answers.
        terminal: The terminal.
        system: The system message, or None.
    """

    def __init__(self, model: LocalModel | RemoteModel, terminal: Terminal, system: str | None) -> None:
        self._model, self._terminal, self._system = model, terminal, system
        self._said: list[Message] = []
        self._last: Answer | None = None
        self._told_dropped = 0

    def run(self) -> None:
        """Runs the conversation until the end of input."""
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
            self._ask([*self._said, {"role": "user", "content": text}])

    def _messages(self, said: list[Message]) -> list[Message]:
        return ([{"role": "system", "content": self._system}] if self._system else []) + said

    def _ask(self, said: list[Message]) -> None:
        """Asks and shows the answer. Text before Ctrl-C stays in the conversation; an unanswered question is dropped."""
        answer = self._last = Answer()
        try:
            with keeping_typed_lines():
                self._show(said, answer)
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
            self._said = [*said, {"role": "assistant", "content": answer.text}]

    def _tell_dropped(self, dropped: int) -> None:
        """Tells the user when more messages were left out."""
        if dropped > self._told_dropped and self._terminal.is_interactive:
            self._terminal.note(f"the oldest {dropped} messages no longer fit the context and were left out")
        self._told_dropped = dropped

    def _show(self, said: list[Message], answer: Answer) -> None:
        began, was_reasoning = time.perf_counter(), False
        with contextlib.closing(self._model.pieces(self._messages(said), answer)) as pieces:
            for piece, is_reasoning in pieces:
                self._tell_dropped(answer.dropped)
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
        self._said, self._told_dropped = [], 0
        self._terminal.note("forgotten")

    def _before_last(self) -> int | None:
        """Index of the last question; None, with an error, if there is none."""
        places = [i for i, message in enumerate(self._said) if message["role"] == "user"]
        if not places:
            self._terminal.problem("nothing has been answered yet")
        return places[-1] if places else None

    def _retry(self, rest: str) -> None:
        if (place := self._before_last()) is not None:
            self._ask(self._said[: place + 1])

    def _undo(self, rest: str) -> None:
        if (place := self._before_last()) is not None:
            text = self._said[place]["content"]
            self._said = self._said[:place]
            self._terminal.note(f"forgotten: {text[:60]}")

    def _set(self, rest: str) -> None:
        from ..sampling_params import FLAGS

        name, _, value = rest.partition(" ")
        name = name.replace("-", "_")
        if name and name not in FLAGS:
            self._terminal.problem(f"/set: {name} is no setting; there are {', '.join(FLAGS)}")
            return
        fields = {key: old for key, old in self._model.fields.items() if key != name}
        if value:
            fields[name] = _value(value.strip())
        if name and not self._take(fields):
            return
        shown = ", ".join(f"{key} {value}" for key, value in self._model.fields.items())
        self._terminal.note(f"{shown or 'nothing set'}; the rest is the model's default")

    def _take(self, fields: dict[str, Any]) -> bool:
        """Checks settings and applies them; returns whether they are valid."""
        from ..sampling_params import SamplingParams

        try:
            SamplingParams(**fields)
        except (LlmpyError, TypeError) as error:
            self._terminal.problem(f"/set: {error}")
            return False
        self._model.fields.clear()
        self._model.fields.update(fields)
        return True

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
            self._terminal.note(f"{len(self._messages(self._said))} messages written to {rest}")

    def _load(self, rest: str) -> None:
        if not rest:
            self._terminal.problem("/load: wanted the name of a file")
            return
        try:
            messages = _read_messages(Path(rest).expanduser())
        except (OSError, ValueError) as error:
            self._terminal.problem(f"/load: {error}")
            return
        start = int(bool(messages) and messages[0]["role"] == "system")
        self._system = messages[0]["content"] if start else None
        self._said, self._told_dropped = messages[start:], 0
        self._terminal.note(f"{len(messages)} messages read from {rest}")

    def _written(self, is_markdown: bool) -> str:
        messages = self._messages(self._said)
        if is_markdown:
            return "".join(f"**{message['role']}**\n\n{message['content']}\n\n" for message in messages)
        return json.dumps(messages, ensure_ascii=False, indent=2) + "\n"

    def _help(self, rest: str) -> None:
        self._terminal.note(HELP)


COMMANDS: dict[str, Callable[[Talk, str], None]] = {
    "/reset": Talk._reset,
    "/retry": Talk._retry,
    "/undo": Talk._undo,
    "/set": Talk._set,
    "/system": Talk._set_system,
    "/stats": Talk._stats,
    "/save": Talk._save,
    "/load": Talk._load,
    "/help": Talk._help,
}


def _read_messages(path: Path) -> list[Message]:
    """Reads messages from a file that /save wrote.

    Raises:
        ValueError: The file has another form.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        read = None
    fields = {"role", "content"}
    if isinstance(read, list) and all(isinstance(one, dict) and one.keys() == fields for one in read):
        return [{"role": str(one["role"]), "content": str(one["content"])} for one in read]
    raise ValueError(f"{path}: wanted a JSON list of messages with role and content, as /save FILE.json writes it")


def _value(text: str) -> Any:
    """The value of a typed setting: a number, a JSON value, else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _history() -> Path | None:
    """File of the typed lines; None for a user without a home folder."""
    try:
        return cache_dir() / "chat_history"
    except ConfigError:
        return None


def run(chosen: Namespace) -> int:
    """Runs a conversation until the end of input."""
    with contextlib.ExitStack() as stack:
        model: LocalModel | RemoteModel
        if chosen.url is None:
            model = LocalModel(stack.enter_context(open_model(chosen)), sampling(chosen))
        else:
            model = RemoteModel(open_server(chosen), sampling(chosen))
        terminal = stack.enter_context(Terminal(_history(), tuple(COMMANDS)))
        Talk(model, terminal, chosen.system).run()
    return 0
