"""The registry of architectures: maps an architecture's name to the function that writes its program."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import UnsupportedError
from .blocks import Model
from .config import ModelConfig

Build = Callable[[ModelConfig, Model], None]

# Buffers in old checkpoints; the configuration has the same values.
COMPUTED_BUFFERS = ("*.rotary_emb.inv_freq", "*.rotary_emb.cos_cached", "*.rotary_emb.sin_cached")


_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
TEXT_SIZES = {
    "llama": dict(zip(_SIZES, (4096, 11008, 32, 32), strict=True)),
    "mistral": dict(zip(_SIZES, (4096, 14336, 32, 32), strict=True)),
    "qwen2": dict(zip(_SIZES, (4096, 22016, 32, 32), strict=True)),
}
"""Sizes of transformers' configuration classes. A text_config that transformers wrote leaves out fields that equal those of its
class: LLaVA 1.5, LLaVA-NeXT and Pixtral were released so."""

PLUGINS = "llmpy.architectures"
"""Entry point group of installed packages: an entry point has an architecture's name and points to its module."""


@dataclass(frozen=True)
class Architecture:
    """A registered architecture function. `fixed` are fields that replace those of config.json."""

    build: Build
    defaults: Mapping[str, object] = field(default_factory=dict)
    ignore: Sequence[str] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    def text(self, raw: Mapping[str, object]) -> "Architecture":
        """The architecture of the text of a model that takes images."""
        nested = text_fields(raw)
        kind = str(nested.get("model_type", "")) if isinstance(nested, Mapping) else ""
        if kind not in self.texts:
            raise UnsupportedError(f"text_config: model_type {kind!r} is not supported; known: {', '.join(self.texts)}")
        return find(self.texts[kind])

    def fields(self, raw: Mapping[str, object]) -> dict[str, object]:
        """A configuration with the names that all families share, and with the architecture's defaults.

        The fields of text_config join those of a model that takes images.
        """
        if self.texts:
            nested = text_fields(raw)
            nested = nested if isinstance(nested, Mapping) else {}
            joined = {**raw, **TEXT_SIZES.get(str(nested.get("model_type")), {}), **nested}
            joined |= {name: raw[name] for name in ("architectures", "tie_word_embeddings", "dtype") if name in raw}
            return {**self.defaults, **self.text(raw).fields(joined), **self.fixed}
        named = {self.renames.get(name, name): value for name, value in raw.items() if value is not None}
        return {**self.defaults, **raw, **named, **self.fixed}


def text_fields(raw: Mapping[str, object]) -> object:
    """The part of a configuration that is the text's: text_config, or language_config (DeepSeek-OCR)."""
    return raw.get("text_config") or raw.get("language_config")


_REGISTRY: dict[str, Architecture] = {}


def architecture(
    *names: str,
    defaults: Mapping[str, object] | None = None,
    ignore: Sequence[str] = (),
    renames: Mapping[str, str] | None = None,
    texts: Mapping[str, str] | None = None,
) -> Callable[[Build], Build]:
    """Registers a function that writes the program of a model; the function may be in the package or in a user's file.

    Args:
        names: Values of `architectures` in config.json. A later registration of a name replaces the earlier one.
        defaults: Fields that config.json may leave out.
        ignore: Patterns (as in `fnmatch`) of tensors that a checkpoint may hold although the program does not use them,
            besides the buffers of rotary embeddings.
        texts: Of a model that takes images: model_type of text_config -> architecture of the text; "": there is no text_config,
            its fields are the model's.
        renames: Names of fields in this family's config.json -> common names: {"n_embd": "hidden_size"}.

    Returns:
        A decorator for a function (config, model) -> None.
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError("architecture() wants the names of the architecture, as in @architecture('LlamaForCausalLM')")

    def register(build: Build) -> Build:
        ignored = (*COMPUTED_BUFFERS, *ignore)
        entry = Architecture(build, dict(defaults or {}), ignored, dict(renames or {}), texts=dict(texts or {}))
        _REGISTRY.update(dict.fromkeys(names, entry))
        return build

    return register


def find(name: str) -> Architecture:
    """Finds an architecture by its name, also in installed packages; UnsupportedError shows the name and similar ones."""
    found = lookup(name)
    if found is None:
        raise unknown(name)
    return found


def lookup(name: str) -> Architecture | None:
    """Like `find`; None: there is no function for the name."""
    if name not in _REGISTRY:
        _load_plugin(name)
    return _REGISTRY.get(name)


def unknown(name: str, why: str = "") -> UnsupportedError:
    """The error for an architecture without a function.

    Args:
        name: The architecture.
        why: Why it is not converted from transformers either, as a sentence.
    """
    return UnsupportedError(
        f"architecture {name!r} is not supported{similar(name, _REGISTRY)}; docs/use/models.md lists those that are. "
        f"{why}{' ' * bool(why)}A function with @llmpy.architecture adds one (docs/develop/adding-an-architecture.md): import "
        "its file before LLM(), or name it with --import FILE"
    )


def similar(name: str, known: Iterable[str]) -> str:
    """Text for an error message with the known names that are similar; "" if there are none."""
    from difflib import get_close_matches

    found = get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    return f"; similar: {', '.join(found)}" if found else ""


def names() -> list[str]:
    """All registered names, sorted."""
    return sorted(_REGISTRY)


def _load_plugin(name: str) -> None:
    """Imports an installed package's entry point for a name; the import registers the function."""
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
