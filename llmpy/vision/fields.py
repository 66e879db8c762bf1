"""Fields of a processor of images: defaults of its class, the model's file, and mm_processor_kwargs over both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..checks import is_int
from ..errors import CheckpointError, ConfigError
from .sizes import Size

OVERRIDES = {
    "min_pixels": "size.shortest_edge",
    "max_pixels": "size.longest_edge",
    "size": "size",
    "do_image_splitting": "do_image_splitting",
    "min_patches": "min_patches",
    "max_patches": "max_patches",
    "do_pan_and_scan": "do_pan_and_scan",
}
"""Keys of mm_processor_kwargs, and the fields that they set."""

MOST_PIXELS = 1 << 30


class Fields:
    """Fields by name, checked when they are read.

    Args:
        values: Fields of the class and of the file, merged.
        file: Name of the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self.values, self.file = dict(values), file

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def wrong(self, name: str, wanted: str, value: object) -> CheckpointError:
        """The error of a field that cannot be used."""
        return CheckpointError(f"{self.file}: {name}: wanted {wanted}, have {value!r}", file=self.file)

    def flag(self, name: str) -> bool:
        """A field that is true or false; null is false."""
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.wrong(name, "true or false", value)

    def count(self, name: str, most: int = 65535) -> int:
        """A whole number from 1 to `most`."""
        value = self.values.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
            return value
        raise self.wrong(name, f"1 to {most}", value)

    def edge(self, name: str, edge: str, most: int = 65535) -> int:
        """An edge of a field of edges; a plain number is any edge."""
        value = self.values.get(name)
        found = value.get(edge) if isinstance(value, Mapping) else value
        if isinstance(found, int) and not isinstance(found, bool) and 1 <= found <= most:
            return found
        raise self.wrong(f"{name}.{edge}", f"1 to {most}", found)

    def has_edge(self, name: str, edge: str) -> bool:
        """Whether a field names an edge."""
        value = self.values.get(name)
        return isinstance(value, Mapping) and value.get(edge) is not None

    def size(self, name: str) -> Size:
        """Height and width of a field of edges."""
        return self.edge(name, "height"), self.edge(name, "width")

    def numbers(self, name: str) -> tuple[float, float, float]:
        """A number for each channel; one number stands for three."""
        value = self.values.get(name)
        listed: Sequence[Any] = value if isinstance(value, list | tuple) else [value] * 3
        if len(listed) == 3 and all(isinstance(item, int | float) and not isinstance(item, bool) for item in listed):
            first, second, third = map(float, listed)
            return first, second, third
        raise self.wrong(name, "three numbers", value)

    def number(self, name: str) -> float:
        """A number above 0."""
        value = self.values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9:
            return float(value)
        raise self.wrong(name, "a number above 0", value)


def merged(defaults: Mapping[str, Any], stored: Mapping[str, Any], given: Mapping[str, object]) -> dict[str, Any]:
    """Fields of a class, a file and mm_processor_kwargs; later ones win.

    Args:
        defaults: Fields of the class.
        stored: Fields of the model's file. Pixel bounds beside `size` are those of size, as older files have them.
        given: mm_processor_kwargs.

    Raises:
        ConfigError: A key that cannot be set, or a value of the wrong type.
    """
    fields = {**defaults, **{key: value for key, value in stored.items() if value is not None}}
    size, usual = fields.get("size"), defaults.get("size")
    if isinstance(size, int) and isinstance(usual, Mapping) and "shortest_edge" in usual:  # older files
        fields["size"] = {"shortest_edge": size}
    for key in ("min_pixels", "max_pixels"):
        if stored.get(key) is not None:
            _set(fields, OVERRIDES[key], stored[key])
    for key, value in given.items():
        if key not in OVERRIDES:
            raise ConfigError(
                f"mm_processor_kwargs: unknown key {key!r}; known are {', '.join(OVERRIDES)}",
                option="mm_processor_kwargs",
                value=key,
            )
        _set(fields, OVERRIDES[key], _checked(key, value))
    return fields


def _set(fields: dict[str, Any], path: str, value: object) -> None:
    name, _, edge = path.partition(".")
    if edge:
        known = fields.get(name)
        fields[name] = {**(known if isinstance(known, Mapping) else {}), edge: value}
    else:
        fields[name] = value


def _checked(key: str, value: object) -> object:
    """The value of a key of mm_processor_kwargs, or ConfigError."""
    if key.startswith("do_"):
        is_right, wanted = isinstance(value, bool), "True or False"
    elif key == "size":
        is_right = isinstance(value, Mapping) and all(is_int(edge) and 1 <= int(edge) <= MOST_PIXELS for edge in value.values())
        wanted = "a dict of edges, such as {'height': 448, 'width': 448}"
    else:
        is_right, wanted = is_int(value) and 1 <= int(value) <= MOST_PIXELS, "a whole number above 0"
    if not is_right:
        message = f"mm_processor_kwargs: {key}: wanted {wanted}, got {value!r}"
        raise ConfigError(message, option="mm_processor_kwargs", value=value)
    return {str(edge): int(side) for edge, side in value.items()} if isinstance(value, Mapping) else value
