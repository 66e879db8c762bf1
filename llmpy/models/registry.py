"""Which function writes the program of which architecture."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import UnsupportedError
from .blocks import Model
from .config import ModelConfig

Build = Callable[[ModelConfig, Model], None]

# Buffers that old checkpoints carry; the configuration says the same.
COMPUTED_BUFFERS = ("*.rotary_emb.inv_freq", "*.rotary_emb.cos_cached", "*.rotary_emb.sin_cached")


PLUGINS = "llmpy.architectures"
"""Group of the entry points of installed packages: their names are those of architectures, they lead to the module."""


@dataclass(frozen=True)
class Architecture:
    """A registered architecture function."""

    build: Build
    defaults: Mapping[str, object] = field(default_factory=dict)
    ignore: Sequence[str] = ()
    renames: Mapping[str, str] = field(default_factory=dict)

    def fields(self, raw: Mapping[str, object]) -> dict[str, object]:
        """A configuration under the names that all families share, with what it leaves out."""
        named = {self.renames.get(name, name): value for name, value in raw.items() if value is not None}
        return {**self.defaults, **raw, **named}


_REGISTRY: dict[str, Architecture] = {}


def architecture(
    *names: str,
    defaults: Mapping[str, object] | None = None,
    ignore: Sequence[str] = (),
    renames: Mapping[str, str] | None = None,
) -> Callable[[Build], Build]:
    """Registers the function that writes the program of a model, in the package or in anybody's file.

    Args:
        names: What `architectures` of config.json may say. A name that is taken is taken over.
        defaults: Fields that config.json may leave out.
        ignore: Patterns (as in `fnmatch`) of tensors that a checkpoint may hold without use, besides the buffers of
            rotary embeddings.
        renames: Fields of config.json that have another name elsewhere: {"n_embd": "hidden_size"}.

    Returns:
        A decorator for a function of (config, model).
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError("architecture() wants the names of the architecture, as in @architecture('LlamaForCausalLM')")

    def register(build: Build) -> Build:
        entry = Architecture(build, dict(defaults or {}), (*COMPUTED_BUFFERS, *ignore), dict(renames or {}))
        _REGISTRY.update(dict.fromkeys(names, entry))
        return build

    return register


def find(name: str) -> Architecture:
    """The architecture of a name, of an installed package too; UnsupportedError names it and those with similar names."""
    if name not in _REGISTRY:
        _load_plugin(name)
    if name not in _REGISTRY:
        raise UnsupportedError(
            f"architecture {name!r} is not supported{similar(name, _REGISTRY)}; docs/use/models.md lists those that are. "
            "A function with @llmpy.architecture adds one (docs/develop/adding-an-architecture.md): import its file before "
            "LLM(), or name it with --import FILE"
        )
    return _REGISTRY[name]


def similar(name: str, known: Iterable[str]) -> str:
    """The known names that look like one, as words for an error message; "" without any."""
    from difflib import get_close_matches

    found = get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    return f"; similar: {', '.join(found)}" if found else ""


def names() -> list[str]:
    """Every name that is registered."""
    return sorted(_REGISTRY)


def _load_plugin(name: str) -> None:
    """Imports what an installed package says of a name; importing it registers the function."""
    from importlib.metadata import entry_points

    for plugin in entry_points(group=PLUGINS, name=name):
        try:
            plugin.load()
        except Exception as error:
            raise UnsupportedError(
                f"architecture {name!r}: entry point {plugin.value!r} of group {PLUGINS!r} cannot be imported: {error!r}"
            ) from error
        if name not in _REGISTRY:
            raise UnsupportedError(
                f"architecture {name!r}: entry point {plugin.value!r} of group {PLUGINS!r} registers no function of this name"
            )
