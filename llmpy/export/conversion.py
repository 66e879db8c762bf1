"""Converts a class of transformers to a program: traces it, walks the graph, and compares the program with the class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from .. import __version__
from ..errors import UnsupportedError
from ..models.blocks import Model
from ..models.config import ModelConfig
from ..models.program import Spec
from ..models.source import Source
from . import arithmetic, attention, ends, layout, mixture, stored
from .names import Names
from .refusal import Refusal, module_of
from .skeleton import skeleton
from .tidy import tidy
from .trace import build, class_of, config_of, trace
from .verify import verify
from .walk import Walk

RULES = (arithmetic, attention, ends, layout, mixture)  # importing them registers their rules


def convert(raw: Mapping[str, object]) -> dict[str, object]:
    """Converts the class of transformers that a configuration names.

    Args:
        raw: The fields of config.json.

    Returns:
        The program as `stored.read` takes it.

    Raises:
        UnsupportedError: the class cannot be converted; the message names the module and the node.
    """
    return Conversion(raw).stored()


def graph(raw: Mapping[str, object]) -> list[str]:
    """The nodes of a class's traced graph, a line each, with the path and the class of their modules.

    Raises:
        UnsupportedError: the class cannot be traced.
    """
    name = ModelConfig(dict(raw), "config.json").architecture
    try:
        kind = class_of(name)
        nodes = trace(build(kind, config_of(kind, raw))).graph.nodes
    except Refusal as refusal:
        raise refusal.error(name) from None
    lines = [(f"{node.name} = {node.target}({', '.join(map(str, node.args))})", module_of(node)) for node in nodes]
    return [f"{line}  # {module}" if module else line for line, module in lines]


class Conversion:
    """One conversion, as far as it goes.

    Args:
        raw: The fields of config.json.
        kind: The class; None: transformers' class that the configuration names.
        config: transformers' configuration object; None: it is made of the fields.

    Attributes:
        model: The module that was traced; None: it could not be made.
        program: The program; its beginning if there is an error; None: there is none.
        error: Why the class cannot be converted; None: it can.
    """

    def __init__(self, raw: Mapping[str, object], kind: Any = None, config: Any = None) -> None:
        self.architecture = ModelConfig(dict(raw), "config.json").architecture
        self.raw = raw if config is None else None
        self.model: Any = None
        self.program: Model | None = None
        self.error: UnsupportedError | None = None
        transformers.utils.logging.set_verbosity_error()
        try:
            kind = kind or class_of(self.architecture)
            config = config or config_of(kind, raw)
            self.model = build(kind, config)
            self.program = self._empty(self.model)
            verify(kind, config, self._filled(self.program, self.model), self._program)
        except Refusal as refusal:
            self.error = refusal.error(self.architecture)

    def check(self) -> None:
        """Raises `error`, if there is one."""
        if self.error is not None:
            raise self.error

    def stored(self) -> dict[str, object]:
        """The contents of the program's file; raises `error`, if there is one."""
        self.check()
        assert self.program is not None
        tied = sorted(Names(self.model).tied)
        made = stored.written(self.program, self.model.config, tied, self.model.base_model_prefix)
        versions = {"llmpy": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
        made |= {"config_key": None if self.raw is None else stored.config_key(self.raw), "made_by": versions}
        return {**made, "digest": stored.digest_of(made)}

    def skeleton(self) -> str:
        """The architecture function as far as it is known."""
        if self.program is None:
            return ""
        fields = {**self.model.config.get_text_config().to_dict(), **self.program.config.raw}
        return skeleton(self.program.spec, fields, "" if self.error is None else str(self.error))

    def _empty(self, model: Any) -> Model:
        fields = stored.fields_of(model.config.get_text_config()) | {"architectures": [self.architecture]}
        return Model(ModelConfig(fields, "config.json"), None, Source(), "checkpoint")

    def _filled(self, m: Model, model: Any) -> Spec:
        """The program of a module."""
        Walk(trace(model), model, m, Names(model)).run()
        tidy(m.spec)
        return m.spec

    def _program(self, model: Any) -> Spec:
        return self._filled(self._empty(model), model)
