"""The adapters (LoRA) of an engine: which are loaded, and the core's number of each."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InvalidRequestError
from ..lora import LoRARequest
from .adapter_images import Made
from .adapter_sources import Images, wrong

if TYPE_CHECKING:
    from .._core import Model
    from ..config import EngineConfig
    from ..models.source import Order
    from .frontend import Frontend


MOST_KNOWN = 65536
"""Most adapters whose names are kept for events of their blocks."""


Move = Callable[[int, int], None]
"""Numbers of two adapters: the requests of the first go on with the second."""


class Adapter(NamedTuple):
    """A loaded adapter.

    Args:
        number: The core's number; a replaced adapter gets a new one.
        request: Name, number and directory as its loader gave them.
        rank: Largest rank of its linears.
        num_linears: Number of linears that it changes.
        pinned: Whether it keeps its slot.
    """

    number: int
    request: LoRARequest
    rank: int
    num_linears: int
    pinned: bool = False


class Chosen(NamedTuple):
    """The adapter of a prompt: the core's number, and the request as the caller gave it."""

    number: int
    request: LoRARequest

    @property
    def text_key(self) -> int:
        """A number of the name, below 2^31: outputs of an adapter draft those of its later revisions, not those of others."""
        return zlib.crc32(self.request.name.encode("utf-8", "surrogatepass")) >> 1


class Adapters:
    """Loads, finds and removes adapters. Any thread may call it.

    Args:
        model: The core's model.
        config: Resolved options.
        moved: As in `Spec`.
    """

    def __init__(self, model: Model, config: EngineConfig, moved: Mapping[str, Order]) -> None:
        self._model, self._config = model, config
        self._images = Images(model, config, moved)
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        """Held while files are read, so that a name is loaded once. Loaded adapters are found meanwhile."""
        self._numbers = count(1)
        self._by_name: dict[str, Adapter] = {}
        self._requests: dict[int, LoRARequest] = {}
        """The newest adapters by number, also those that are no longer loaded."""
        self._lent: dict[int, Made] = {}
        """Images by number, while the core may read them."""

    def choose(self, given: object) -> Chosen | None:
        """The adapter that a request names; loads it if its name is new.

        Args:
            given: `lora_request`: a LoRARequest, the name of a loaded adapter, or None.

        Raises:
            InvalidRequestError: Adapters are off, the name is unknown, or it stands for another directory.
        """
        if given is None:
            return None
        if isinstance(given, str):
            given = LoRARequest(given)
        if not isinstance(given, LoRARequest):
            raise TypeError(f"lora_request must be a LoRARequest or a name, but is of type {type(given).__name__}")
        self._check()
        known = self._find(given.name)
        if known is None and not given.path:
            raise wrong(f"there is no adapter {given.name!r}; load_adapter() or lora_path loads one", given.name)
        if known is None:
            with self._loading:
                known = self._find(given.name) or self._load(given, given.path, None)
        if given.path and given.path != known.request.path:
            message = f"the adapter {given.name!r} was loaded from {known.request.path or 'memory'}, not from {given.path}"
            raise wrong(f"{message}; load_adapter() replaces it", given.name)
        return Chosen(known.number, given)

    def load(
        self, name: str, source: object, config: Mapping[str, Any] | None, pinned: bool = False, move: Move | None = None
    ) -> Adapter:
        """Loads an adapter, or replaces the one of this name for later requests.

        Args:
            name: Its name.
            source: A PEFT directory, or tensors by PEFT's names.
            config: With tensors: the content of adapter_config.json.
            pinned: Whether it keeps its slot.
            move: What lets requests with the former adapter go on with this one; None: they keep theirs.
        """
        self._check()
        path = str(source) if isinstance(source, str | Path) else ""
        with self._loading:
            num_others = sum(one.pinned for one in self.list() if one.request.name != name)
            if pinned and num_others + 1 >= self._config.max_loras:
                raise wrong(f"pinned: wanted fewer pinned adapters than max_loras ({self._config.max_loras}); raise it", name)
            return self._load(LoRARequest(name, 1, path), source, config, pinned, move)

    def equals(self, name: str, source: object, config: Mapping[str, Any] | None) -> bool:
        """Whether the adapter of this name has the bits that `load` would give it."""
        self._check()
        known = self._find(name)
        if known is None:
            raise wrong(f"there is no adapter {name!r}", name)
        with self._loading:
            return self._lent[known.number].equals(self._images.make(name, source, config)[0])

    def remove(self, name: str) -> None:
        """Forgets an adapter; requests that have it go on with it."""
        with self._lock:
            adapter = self._by_name.pop(name, None)
        if adapter is None:
            raise wrong(f"there is no adapter {name!r}", name)
        self._model.remove_adapter(adapter.number)
        self._sweep()

    def list(self) -> list[Adapter]:
        """The loaded adapters, the oldest name first."""
        with self._lock:
            return [*self._by_name.values()]

    def knows(self, name: str) -> bool:
        """Whether an adapter of this name is loaded."""
        return self._find(name) is not None

    def named(self, number: int) -> LoRARequest | None:
        """The adapter of a number of the core; None: 0, which stands for none.

        Args:
            number: Of an adapter that is loaded or was.
        """
        if not number:
            return None
        with self._lock:
            return self._requests.get(number) or LoRARequest(f"adapter {number}")

    def running(self) -> set[int]:
        """Numbers of the adapters that samples run with."""
        return set(self._model.running_adapters())

    def _find(self, name: str) -> Adapter | None:
        with self._lock:
            return self._by_name.get(name)

    def _check(self) -> None:
        if not self._config.enable_lora:
            raise wrong("the engine serves no adapters; make it with enable_lora=True", None)

    def _load(
        self, request: LoRARequest, source: object, config: Mapping[str, Any] | None, pinned: bool = False,
        move: Move | None = None,
    ) -> Adapter:  # fmt: skip
        made, plan = self._images.make(request.name, source, config)
        adapter = Adapter(next(self._numbers), request, plan.rank, plan.num_linears, pinned)
        self._model.lend_adapter(adapter.number, *made.memory, pinned)
        with self._lock:
            before = self._by_name.get(request.name)
            self._by_name[request.name] = adapter
            self._requests[adapter.number] = request
            self._requests.pop(adapter.number - MOST_KNOWN, None)
            self._lent[adapter.number] = made
        if before is not None and move is not None:
            move(before.number, adapter.number)
        if before is not None:
            self._model.remove_adapter(before.number)
        self._sweep()
        return adapter

    def _sweep(self) -> None:
        """Frees the images of adapters that were removed, if no request or slot has them."""
        with self._lock:
            self._lent = {number: made for number, made in self._lent.items() if self._model.holds_adapter(number)}


class AdapterCalls:
    """The calls of LLM and AsyncEngine for adapters."""

    _frontend: Frontend

    def _move_adapter(self, before: int, number: int) -> None:
        raise NotImplementedError

    def load_adapter(
        self, name: str, source: object, config: Mapping[str, Any] | None = None, *, pinned: bool = False,
        on_running: str = "keep",
    ) -> None:  # fmt: skip
        """Loads an adapter for `lora_request=name`, or replaces the one of this name.

        Cached prefixes of a replaced adapter are not found again.

        Args:
            name: Its name.
            source: A PEFT directory, or a mapping of PEFT's tensor names to arrays or tensors.
            config: With a mapping: the content of adapter_config.json (`r`, `lora_alpha`, ...).
            pinned: Whether it keeps its slot from its first request on. There must be fewer such adapters than `max_loras`.
            on_running: Requests in flight with the replaced adapter: "keep" goes on with that one; "recompute" goes on with the
                new one from the next token on, and computes the cache again. Beam searches keep theirs.

        Raises:
            InvalidRequestError: Adapters are off, the rank is above `max_lora_rank`, too many adapters are pinned, or
                `on_running` is another word.
            CheckpointError: A tensor has a wrong name, type or shape.
            UnsupportedError: The adapter changes more than linears.

        Example:
            >>> llm.load_adapter("maths", "adapters/maths")
            >>> llm.generate("2 + 2 =", lora_request="maths")
        """
        if on_running not in ("keep", "recompute"):
            message = f"on_running must be 'keep' or 'recompute', got {on_running!r}."
            raise InvalidRequestError(message, parameter="on_running", value=on_running)
        self._frontend.adapters.load(name, source, config, pinned, self._move_adapter if on_running == "recompute" else None)

    def compare_adapter(self, name: str, source: object, config: Mapping[str, Any] | None = None) -> bool:
        """Compares a loaded adapter with a source, bit for bit.

        Args:
            name, source, config: As in `load_adapter`.

        Returns:
            Whether loading the source would change nothing.

        Raises:
            InvalidRequestError: There is no adapter of this name.
            CheckpointError, UnsupportedError: As in `load_adapter`.
        """
        return self._frontend.adapters.equals(name, source, config)

    def remove_adapter(self, name: str) -> None:
        """Forgets an adapter; requests in flight go on with it.

        Args:
            name: Its name.

        Raises:
            InvalidRequestError: There is no adapter of this name.
        """
        self._frontend.adapters.remove(name)

    def list_adapters(self) -> list[LoRARequest]:
        """The loaded adapters: name, number and directory ("" for tensors).

        Returns:
            One LoRARequest each, the oldest name first.
        """
        return [one.request for one in self._frontend.adapters.list()]
