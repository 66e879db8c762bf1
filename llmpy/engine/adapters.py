"""The adapters (LoRA) of an engine: which are loaded, and the core's number of each."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CheckpointError, InvalidRequestError, UnsupportedError
from ..lora import LoRARequest
from ..weights import stacked
from . import adapter_images

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .._core import Model
    from ..config import EngineConfig
    from .frontend import Frontend
    from .peft import Factors, Found


MOST_KNOWN = 65536
"""Most adapters whose names are kept for events of their blocks."""


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


class Place(NamedTuple):
    """Where an image has rows of one tensor; row r is the tensor's row first + r // inner * stride + r % inner.

    `matrix` numbers the matrices of the program; `experts` is 0 for those of linears.
    """

    tensor: str
    tensor_rows: int
    rows: int
    columns: int
    first: int
    inner: int
    stride: int
    head: int
    a: int
    b: int
    matrix: int
    experts: int

    def source_rows(self) -> npt.NDArray[np.int64]:
        """The tensor's row of each row."""
        import numpy as np

        rows = np.arange(self.rows)
        return self.first + rows // self.inner * self.stride + rows % self.inner


class Adapters:
    """Loads, finds and removes adapters. Any thread may call it.

    Args:
        model: The core's model.
        config: Resolved options.
    """

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self._model, self._config = model, config
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        """Held while files are read, so that a name is loaded once. Loaded adapters are found meanwhile."""
        self._numbers = count(1)
        self._by_name: dict[str, Adapter] = {}
        self._requests: dict[int, LoRARequest] = {}
        """The newest adapters by number, also those that are no longer loaded."""
        self._lent: dict[int, Any] = {}
        """Images by number, while the core may read them."""
        self._plan: adapter_images.Plan | None = None
        """Of the last adapter whose tensors came from memory: a trainer brings the same ones again and again."""

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
            raise _wrong(f"there is no adapter {given.name!r}; load_adapter() or lora_path loads one", given.name)
        if known is None:
            with self._loading:
                known = self._find(given.name) or self._load(given, given.path, None)
        if given.path and given.path != known.request.path:
            message = f"the adapter {given.name!r} was loaded from {known.request.path or 'memory'}, not from {given.path}"
            raise _wrong(f"{message}; load_adapter() replaces it", given.name)
        return Chosen(known.number, given)

    def load(
        self, name: str, source: object, config: Mapping[str, Any] | None, number: int = 1, pinned: bool = False
    ) -> Adapter:
        """Loads an adapter, or replaces the one of this name for later requests.

        Args:
            name: Its name.
            source: A PEFT directory, or tensors by PEFT's names.
            config: With tensors: the content of adapter_config.json.
            number: `lora_int_id`.
            pinned: Whether it keeps its slot.
        """
        self._check()
        path = str(source) if isinstance(source, str | Path) else ""
        with self._loading:
            num_others = sum(one.pinned for one in self.list() if one.request.name != name)
            if pinned and num_others + 1 >= self._config.max_loras:
                raise _wrong(f"pinned: wanted fewer pinned adapters than max_loras ({self._config.max_loras}); raise it", name)
            return self._load(LoRARequest(name, number, path), source, config, pinned)

    def equals(self, name: str, source: object, config: Mapping[str, Any] | None) -> bool:
        """Whether the adapter of this name has the bits that `load` would give it."""
        self._check()
        known = self._find(name)
        if known is None:
            raise _wrong(f"there is no adapter {name!r}", name)
        with self._loading:
            return adapter_images.equal(self._lent[known.number], self._image(name, source, config)[0])

    def remove(self, name: str) -> None:
        """Forgets an adapter; requests that have it go on with it."""
        with self._lock:
            adapter = self._by_name.pop(name, None)
        if adapter is None:
            raise _wrong(f"there is no adapter {name!r}", name)
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
            raise _wrong("the engine serves no adapters; make it with enable_lora=True", None)

    def _load(
        self, request: LoRARequest, source: object, config: Mapping[str, Any] | None, pinned: bool = False
    ) -> Adapter:
        image, plan = self._image(request.name, source, config)
        adapter = Adapter(next(self._numbers), request, plan.rank, plan.num_linears, pinned)
        self._model.lend_adapter(adapter.number, *adapter_images.memory(image), pinned)
        with self._lock:
            before = self._by_name.get(request.name)
            self._by_name[request.name] = adapter
            self._requests[adapter.number] = request
            self._requests.pop(adapter.number - MOST_KNOWN, None)
            self._lent[adapter.number] = image
        if before is not None:
            self._model.remove_adapter(before.number)
        self._sweep()
        return adapter

    def _sweep(self) -> None:
        """Frees the images of adapters that were removed, if no request or slot has them."""
        with self._lock:
            self._lent = {number: image for number, image in self._lent.items() if self._model.holds_adapter(number)}

    def _image(self, name: str, source: object, config: Mapping[str, Any] | None) -> tuple[Any, adapter_images.Plan]:
        """What a slot of the model's memory holds, as an array or as a tensor on the device, and how it was made."""
        device = adapter_images.device_of(source, self._config)
        plan = self._plan
        if plan is not None and isinstance(source, Mapping) and plan.fits(source, config):
            return plan.image(source, device), plan
        size_bytes, tuples = self._model.adapter_places()
        places = [Place(*each) for each in tuples]
        found, where = _read(name, source, config, device is not None)
        if found.experts and device is not None:
            found, where = _read(name, source, config)
            device = None
        stacks = [each for parameters in found.experts.values() for each in parameters]
        every = [*found.matrices.values(), *(one for each in stacks for one in each)]
        pairs = [*self._pairs(found, places, where)]
        plan = adapter_images.Plan(size_bytes, pairs, max(len(one.a) for one in every), len(every), config)
        image = plan.image({name: tensor for one in every for name, tensor in zip(one.names, one[:2], strict=True)}, device)
        for module, parameters in found.experts.items():
            for each in parameters:
                self._put_experts(image, places, module, each, where)
        self._plan = None if found.experts or config is None else plan
        return image, plan

    def _pairs(self, found: Found, places: Sequence[Place], where: str) -> Iterator[tuple[Place, Factors]]:
        """The places of the matrices that an adapter changes, with their factors."""
        by_tensor: dict[str, list[Place]] = {}
        for place in places:
            by_tensor.setdefault(place.tensor, []).append(place)
        if not found.matrices and not found.experts:
            raise CheckpointError(f"{where}: wanted factors of linears, have no tensor", file=where, tensor="")
        for name, factors in found.matrices.items():
            tensor = stacked.places(name, by_tensor.__contains__)[0].name
            if tensor not in by_tensor:
                self._refuse(tensor, where)
            for place in by_tensor[tensor]:
                self._check_shapes(place, factors, where)
                yield place, factors

    def _put_experts(self, image: Any, places: Sequence[Place], module: str, factors: Sequence[Factors], where: str) -> None:
        """Writes the factors of a parameter that has the matrices of all experts of a layer."""
        matrices = _experts_of(_layer(module), places)
        if not matrices:
            self._refuse(f"{module}.weight", where)
        rank, rows, columns = len(factors[0].a), len(factors[0].b), factors[0].a.shape[1]
        self._check_rank(module, rank, where)
        have, shapes = (len(factors), rows, columns), {}
        for parts in matrices:
            of_expert = parts[: len(parts) // parts[0].experts]
            shapes[parts[0].experts, sum(part.rows for part in of_expert), parts[0].columns] = parts
        if have not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(
                f"{where}: the experts of {module}: wanted [experts, rows, columns] {wanted}, have {list(have)}",
                file=where,
                tensor=f"{module}.lora_B.weight",
            )
        parts, per_expert = shapes[have], len(shapes[have]) // len(factors)
        for i, place in enumerate(parts):
            expert, of_expert = i // per_expert, parts[i // per_expert * per_expert :][:per_expert]
            of_tensor = [part.rows for part in of_expert if part.tensor == place.tensor]
            is_stacked = len(factors) > 1 and parts[0].tensor == parts[per_expert].tensor
            before = expert * sum(of_tensor) if is_stacked else 0
            above = sum(part.rows for part in of_expert[: i % per_expert] if part.tensor != place.tensor)
            _put(image, place, factors[expert], place.source_rows() - before + above)

    def _refuse(self, tensor: str, where: str) -> None:
        if ".experts" in tensor and not self._config.lora_experts:
            raise _wrong(f"{where}: the adapter changes experts ({tensor}); make the engine with lora_experts=True", tensor)
        known = {info["name"] for info in self._model.weight_info()}
        if stacked.places(tensor, known.__contains__)[0].name in known:
            raise UnsupportedError(
                f"{where}: an adapter of {tensor} is not supported yet, only linears; merge the adapter into the checkpoint"
            )
        raise CheckpointError(
            f"{where}: the adapter changes {tensor}, which the model does not have; is it of another model?",
            file=where,
            tensor=tensor,
        )

    def _check_rank(self, tensor: str, rank: int, where: str) -> None:
        if rank > (most := self._config.max_lora_rank):
            message = f"{where}: the adapter of {tensor} has rank {rank}, max_lora_rank is {most}; raise it"
            raise InvalidRequestError(message, parameter="lora_request", value=rank)

    def _check_shapes(self, place: Place, factors: Factors, where: str) -> None:
        rank = len(factors.a)
        self._check_rank(place.tensor, rank, where)
        for letter, have, wanted in (
            ("A", factors.a.shape, (rank, place.columns)),
            ("B", factors.b.shape, (place.tensor_rows, rank)),
        ):
            if have != wanted:
                name = f"{place.tensor.removesuffix('.weight')}.lora_{letter}.weight"
                raise CheckpointError(
                    f"{where}: tensor {name}: wanted {list(wanted)}, have {list(have)}", file=where, tensor=name
                )


def _put(image: Any, place: Place, factors: Factors, rows: npt.NDArray[np.int64]) -> None:
    """Writes the factors of a place, whose rows are these rows of B."""
    rank = len(factors.a)
    image.view("uint32")[place.head // 4] = rank
    image[place.head // 4 + 1] = factors.scale
    image[place.a // 4 :][: factors.a.size] = factors.a.ravel()
    image[place.b // 4 :][: rank * place.rows] = factors.b[rows].T.ravel()


def _experts_of(layer: str, places: Sequence[Place]) -> list[list[Place]]:
    """The places of each matrix of a layer's experts."""
    found: dict[int, list[Place]] = {}
    for place in places:
        if place.experts and _layer(place.tensor) == layer:
            found.setdefault(place.matrix, []).append(place)
    return [*found.values()]


def _layer(name: str) -> str:
    """The number of the layer in a name."""
    return next((part for part in name.split(".") if part.isdecimal()), "")


def _read(name: str, source: object, config: Mapping[str, Any] | None, on_device: bool = False) -> tuple[Found, str]:
    """The factors of a directory or of tensors, and where they come from, for errors."""
    from . import peft

    if not isinstance(source, Mapping):
        return peft.read(str(source)), str(source)
    if config is None:
        raise TypeError("config: wanted the content of adapter_config.json (r, lora_alpha) beside tensors")
    return peft.factors(source, config, f"adapter {name}", on_device), f"adapter {name}"


def _wrong(message: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"lora_request: {message}", parameter="lora_request", value=value)


class AdapterCalls:
    """The calls of LLM and AsyncEngine for adapters."""

    _frontend: Frontend

    def load_adapter(
        self, name: str, source: object, config: Mapping[str, Any] | None = None, *, pinned: bool = False
    ) -> None:
        """Loads an adapter for `lora_request=name`, or replaces the one of this name.

        Requests in flight keep the adapter that they began with. Cached prefixes of a replaced adapter are not found again.

        Args:
            name: Its name.
            source: A PEFT directory, or a mapping of PEFT's tensor names to arrays or tensors.
            config: With a mapping: the content of adapter_config.json (`r`, `lora_alpha`, ...).
            pinned: Whether it keeps its slot from its first request on. There must be fewer such adapters than `max_loras`.

        Raises:
            InvalidRequestError: Adapters are off, the rank is above `max_lora_rank`, or too many adapters are pinned.
            CheckpointError: A tensor has a wrong name, type or shape.
            UnsupportedError: The adapter changes more than linears.

        Example:
            >>> llm.load_adapter("maths", "adapters/maths")
            >>> llm.generate("2 + 2 =", lora_request="maths")
        """
        self._frontend.adapters.load(name, source, config, pinned=pinned)

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
