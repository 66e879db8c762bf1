"""Makes the images of adapters: finds where each of their tensors goes, and refuses what the engine cannot serve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CheckpointError, InvalidRequestError, UnsupportedError
from ..models.source import Order
from ..weights import bfloat16, stacked
from . import adapter_images
from .adapter_images import Made

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .._core import Model
    from ..config import EngineConfig
    from .peft import Factors, Found

VOCABULARY_MODULES = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings", "tok_embeddings")
"""Last names of embeddings and heads."""

EMBEDDING, HEAD = 1, 2
"""Values of `Place.use` (enum lora_use)."""


class Place(NamedTuple):
    """Where an image has rows of one tensor; row r is the tensor's row first + r // inner * stride + r % inner.

    `matrix` numbers the matrices of the program; `experts` is 0 for those of linears, else `expert` is one of them. Of an
    embedding `rows` are its columns, and A has a column for each id. `bias` is 0 if the device takes no bias. `has_whole` is 0
    if it takes no matrix in place of the model's. `item` is the bytes of a value of A and B: 4, or 2 for bfloat16. `order` is
    that of the tensor in the model's file.
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
    bias: int
    matrix: int
    experts: int
    expert: int
    use: int
    has_whole: int
    item: int
    order: Order

    def source_rows(self) -> npt.NDArray[np.int64]:
        """The checkpoint's row of each row."""
        return adapter_images.source_rows(self.rows, self.first, self.inner, self.stride, self.order.heads)

    def source_columns(self) -> npt.NDArray[np.int64] | None:
        """The checkpoint's column of each column; None: they are in order."""
        return adapter_images.source_columns(self.order.columns)


class Images:
    """Makes the images of a model's adapters. One thread at a time calls it.

    Args:
        model: The core's model.
        config: Resolved options.
        moved: As in `Spec`.
    """

    def __init__(self, model: Model, config: EngineConfig, moved: Mapping[str, Order]) -> None:
        self._model, self._config, self._moved = model, config, moved
        self._rounds = config.lora_dtype == "bfloat16"
        self._plan: adapter_images.Plan | None = None
        """Of the last adapter whose tensors came from memory: a trainer brings the same ones again and again."""

    def make(self, name: str, source: object, config: Mapping[str, Any] | None) -> tuple[Made, adapter_images.Plan]:
        """What a slot of the model's memory holds, as an array or as a tensor on the device, and how it was made.

        Args:
            name: Of the adapter, for errors.
            source: A PEFT directory, or tensors by PEFT's names.
            config: With tensors: the content of adapter_config.json.
        """
        device = adapter_images.device_of(source, self._config)
        plan = self._plan
        if plan is not None and isinstance(source, Mapping) and plan.fits(source, config):
            return Made(plan.image(source, device), {}), plan
        size_bytes, tuples = self._model.adapter_places()
        places = [Place(*(*each, self._moved.get(each[0], Order()))) for each in tuples]
        found, where = _read(name, source, config, device is not None)
        if device is not None and any(found._replace(matrices={}, embeddings={}, copies={})):
            found, where = _read(name, source, config)
            device = None
        stacks = [each for parameters in found.experts.values() for each in parameters]
        every = [*found.matrices.values(), *found.embeddings.values(), *(one for each in stacks for one in each)]
        pairs = [*self._pairs(found, places, where)]
        rank = max((len(one.a) for one in every), default=0)
        plan = adapter_images.Plan(size_bytes, pairs, rank, len(every), config, self._rounds)
        image = plan.image({name: tensor for one in every for name, tensor in zip(one.names, one[:2], strict=True)}, device)
        for module, parameters in found.experts.items():
            for each in parameters:
                self._put_experts(image, places, module, each, where)
        self._put_biases(image, places, found, where)
        is_plain = config is not None and not any(found._replace(matrices={}, embeddings={}))
        self._plan = plan if is_plain else None
        return Made(image, self._put_whole(image, places, found, where)), plan

    def _pairs(self, found: Found, places: Sequence[Place], where: str) -> Iterator[tuple[Place, Factors]]:
        """The places of the matrices that an adapter changes, with their factors."""
        linears, embeddings = _by_tensor(places)
        if not any(found):
            raise CheckpointError(f"{where}: wanted factors of linears, have no tensor", file=where, tensor="")
        for of_found, by_tensor in ((found.matrices, linears), (found.embeddings, embeddings)):
            for name, factors in of_found.items():
                for place in self._places_of(name, by_tensor, where):
                    self._check_shapes(place, factors, where)
                    yield place, factors
        for name, have in found.copies.items():
            self._check_whole(name, have, _either(name, places), where)

    def _check_whole(self, name: str, have: Sequence[int], by_tensor: Mapping[str, Sequence[Place]], where: str) -> None:
        """Fails unless a whole matrix has the shape of the model's."""
        place = self._places_of(name, by_tensor, where)[0]
        wanted = (place.columns, place.rows) if place.use == EMBEDDING else (place.tensor_rows, place.columns)
        if tuple(have) != wanted:
            message = f"{where}: tensor {name}: wanted {list(wanted)}, have {list(have)}"
            raise CheckpointError(message, file=where, tensor=name)

    def _places_of(self, name: str, by_tensor: Mapping[str, Sequence[Place]], where: str) -> Sequence[Place]:
        tensor = stacked.places(name, by_tensor.__contains__)[0].name
        if tensor not in by_tensor:
            self._refuse(tensor, where)
        self._check_order(tensor, where)
        return by_tensor[tensor]

    def _check_order(self, tensor: str, where: str) -> None:
        """Refuses a tensor if A and B cannot be put in the order of the model's file."""
        if self._moved.get(tensor, Order()).is_other:
            raise UnsupportedError(
                f"{where}: an adapter of {tensor} is not supported yet: {self._config.model} has it in another order, or with "
                "other values, than the checkpoint; load the model's safetensors, or merge the adapter"
            )

    def _put_biases(self, image: Any, places: Sequence[Place], found: Found, where: str) -> None:
        """Writes the biases of linears: enum lora_bias, and the values."""
        linears, _ = _by_tensor(places)
        for name in {**found.biases, **found.added}:
            for place in self._places_of(name, linears, where):
                self._check_room(place, place.bias, f"an adapter's bias ({name})", where)
                each = [one[name] for one in (found.biases, found.added) if name in one]
                if any(bias.shape != (place.tensor_rows,) for bias in each):
                    message = f"{where}: a bias of {name}: wanted [{place.tensor_rows}], have {list(each[-1].shape)}"
                    raise CheckpointError(message, file=where, tensor=name)
                image.view("uint32")[place.head // 4 + 2] = 2 if name in found.biases else 1
                image[place.bias // 4 :][: place.rows] = sum(bias[place.source_rows()] for bias in each)

    def _check_room(self, place: Place, has_room: int, what: str, where: str) -> None:
        """Refuses biases and whole matrices where the backend takes none."""
        if not has_room or place.experts:
            how = "for experts" if has_room else f"on {self._config.device}"
            raise UnsupportedError(f"{where}: {what} is not supported yet {how}; merge the adapter into the checkpoint")

    def _put_whole(self, image: Any, places: Sequence[Place], found: Found, where: str) -> dict[int, npt.NDArray[np.float32]]:
        """Writes the addresses of matrices that stand in place of the model's; returns the matrices by where that is."""
        import numpy as np

        kept = {}
        for name, matrix in found.whole.items():
            by_tensor = _either(name, places)
            self._check_whole(name, matrix.shape, by_tensor, where)
            for place in self._places_of(name, by_tensor, where):
                self._check_room(place, place.has_whole, f"modules_to_save of an adapter ({name})", where)
                rows = matrix if place.use == EMBEDDING else matrix[place.source_rows()]
                columns = place.source_columns()
                rows = rows if columns is None else rows[:, columns]
                kept[place.head + 16] = rows = np.ascontiguousarray(rows, np.float32)
                image.view(np.uint64)[place.head // 8 + 2] = rows.ctypes.data
        return kept

    def _put_experts(self, image: Any, places: Sequence[Place], module: str, factors: Sequence[Factors], where: str) -> None:
        """Writes the factors of a parameter that has the matrices of all experts of a layer."""
        matrices = _experts_of(_layer(module), places)
        if not matrices:
            self._refuse(f"{module}.weight", where)
        for part in (part for parts in matrices for part in parts):
            self._check_order(part.tensor, where)
        rank, rows, columns = len(factors[0].a), len(factors[0].b), factors[0].a.shape[1]
        self._check_rank(module, rank, where)
        have, shapes = (len(factors), rows, columns), {}
        for parts in matrices:
            shapes[parts[0].experts, sum(part.rows for part in parts if not part.expert), parts[0].columns] = parts
        if have not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(
                f"{where}: the experts of {module}: wanted [experts, rows, columns] {wanted}, have {list(have)}",
                file=where,
                tensor=f"{module}.lora_B.weight",
            )
        offsets = _offsets(shapes[have])
        if self._rounds:
            factors = [one._replace(a=bfloat16.rounded(one.a), b=bfloat16.rounded(one.b)) for one in factors]
        for place in shapes[have]:
            _put(image, place, factors[place.expert], place.source_rows() + offsets[place.expert, place.tensor])

    def _refuse(self, tensor: str, where: str) -> None:
        if ".experts" in tensor and not self._config.lora_experts:
            raise wrong(f"{where}: the adapter changes experts ({tensor}); make the engine with lora_experts=True", tensor)
        is_of_vocabulary = tensor.removesuffix(".weight").rpartition(".")[2] in VOCABULARY_MODULES
        if is_of_vocabulary and not self._config.lora_embeddings:
            raise wrong(f"{where}: the adapter changes {tensor}; make the engine with lora_embeddings=True", tensor)
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


def _by_tensor(places: Sequence[Place]) -> tuple[dict[str, list[Place]], dict[str, list[Place]]]:
    """The places of linears and the head, and of embeddings, by tensor. A head that shares the embedding's is lm_head."""
    embeddings: dict[str, list[Place]] = {}
    linears: dict[str, list[Place]] = {}
    for place in places:
        if place.use == EMBEDDING:
            embeddings.setdefault(place.tensor, []).append(place)
    for place in places:
        is_tied = place.use == HEAD and place.tensor in embeddings
        if place.use != EMBEDDING:
            linears.setdefault("lm_head.weight" if is_tied else place.tensor, []).append(place)
    return linears, embeddings


def _either(name: str, places: Sequence[Place]) -> Mapping[str, Sequence[Place]]:
    """The places among which those of a weight are: of embeddings, or of linears and the head."""
    linears, embeddings = _by_tensor(places)
    return embeddings if stacked.places(name, embeddings.__contains__)[0].name in embeddings else linears


def _put(image: Any, place: Place, factors: Factors, rows: npt.NDArray[np.int64]) -> None:
    """Writes the factors of a place, whose rows are these rows of B."""
    rank = len(factors.a)
    image.view("uint32")[place.head // 4] = rank
    image[place.head // 4 + 1] = factors.scale
    image[place.a // 4 :][: factors.a.size] = factors.a.ravel()
    image[place.b // 4 :][: rank * place.rows] = factors.b[rows].T.ravel()


def _experts_of(layer: str, places: Sequence[Place]) -> list[list[Place]]:
    """The places of each matrix of a layer's experts, in all ranks."""
    found: dict[int, list[Place]] = {}
    for place in places:
        if place.experts and _layer(place.tensor) == layer:
            found.setdefault(place.matrix, []).append(place)
    return [*found.values()]


def _offsets(parts: Sequence[Place]) -> dict[tuple[int, str], int]:
    """By expert and tensor: the distance of a row of the tensor to the same row of the expert's matrix."""
    rows: Counter[tuple[int, str]] = Counter()
    for part in parts:
        rows[part.expert, part.tensor] += part.rows
    before: Counter[str] = Counter()
    above: Counter[int] = Counter()
    offsets = {}
    for (expert, tensor), n in sorted(rows.items(), key=lambda item: item[0][0]):
        offsets[expert, tensor] = above[expert] - before[tensor]
        before[tensor] += n
        above[expert] += n
    return offsets


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


def wrong(message: str, value: object) -> InvalidRequestError:
    """The error of a request for an adapter that cannot be had."""
    return InvalidRequestError(f"lora_request: {message}", parameter="lora_request", value=value)
