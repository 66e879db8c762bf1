"""The key-values of a GGUF file, checked as they are read."""

from collections.abc import Mapping
from typing import NoReturn, TypeVar, overload

from ...errors import CheckpointError, UnsupportedError
from ..config import typed

T = TypeVar("T", bound=int | float | str | bool)


class Metadata:
    """The metadata of a GGUF file.

    Args:
        values: All key-values.
        tensors: Name to (dtype, shape, file).
        file: Path, for messages.

    Attributes:
        architecture: general.architecture, the prefix of the model's keys.
        seen: Keys of the model that were read, without the prefix.
    """

    def __init__(
        self, values: Mapping[str, object], tensors: Mapping[str, tuple[str, tuple[int, ...], str]], file: str
    ) -> None:
        self.values, self.tensors, self.file = values, tensors, file
        self.architecture = str(values.get("general.architecture"))
        self.seen: set[str] = set()

    def raw(self, key: str) -> object:
        """The value of a key of the model; None if it is absent."""
        self.seen.add(key)
        return self.values.get(f"{self.architecture}.{key}")

    @overload
    def get(self, key: str, kind: type[T]) -> T | None: ...
    @overload
    def get(self, key: str, kind: type[T], default: T) -> T: ...
    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """A scalar. A list with a value for each layer counts as a scalar if all its non-zero values are equal."""
        value = self.raw(key)
        if isinstance(value, list) and value:
            given = [item for item in value if item != 0] or value[:1]
            if any(item != given[0] for item in given):
                raise UnsupportedError(f"{self.file}: {self.architecture}.{key} differs between layers")
            value = given[0]
        if value is None:
            return default
        found = typed(value, kind)
        if found is None:
            self._refuse(key, kind, repr(value))
        return found

    def need(self, key: str, kind: type[T]) -> T:
        """A required scalar."""
        value = self.get(key, kind)
        if value is None:
            self._refuse(key, kind, "nothing")
        return value

    def each(self, key: str) -> list[object]:
        """A value for each layer, from a list or from one value for all layers."""
        value, n_layers = self.raw(key), self.n_layers
        if not isinstance(value, list):
            return [value] * n_layers
        if len(value) < n_layers:
            raise CheckpointError(
                f"{self.file}: metadata {self.architecture}.{key}: wanted {n_layers} values, have {len(value)}", file=self.file
            )
        return value[:n_layers]

    @property
    def n_layers(self) -> int:
        """Number of layers without those for multi-token prediction. Every layer has a tensor, so no more than tensors."""
        count, most = self.need("block_count", int), len(self.tensors)
        if not 0 < count <= most:
            key = f"{self.architecture}.block_count"
            raise CheckpointError(
                f"{self.file}: metadata {key}: wanted 1 to {most}, the number of tensors, have {count}", file=self.file
            )
        return count - self.get("nextn_predict_layers", int, 0)

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor; "#" stands for the number of any layer."""
        if "#" not in tensor:
            return tensor in self.tensors
        return any(tensor.replace("#", str(layer)) in self.tensors for layer in range(self.n_layers))

    def with_tensor(self, tensor: str) -> list[int]:
        """The layers that have a tensor; "#" stands for their number."""
        return [layer for layer in range(self.n_layers) if tensor.replace("#", str(layer)) in self.tensors]

    def _refuse(self, key: str, kind: type[T], have: str) -> NoReturn:
        raise CheckpointError(
            f"{self.file}: metadata {self.architecture}.{key}: wanted {kind.__name__}, have {have}", file=self.file
        )
