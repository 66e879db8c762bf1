"""Converts a class of transformers to a program: traces it, walks the graph, and compares the program with the class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from ..models.blocks import Model
from ..models.config import ModelConfig
from ..models.source import Source
from . import arithmetic, attention, ends, layout, mixture, stored
from .names import Names
from .refusal import Refusal
from .tidy import tidy
from .trace import build, class_of, config_of, trace
from .verify import verify
from .walk import Walk

RULES = (arithmetic, attention, ends, layout, mixture)  # importing them registers their rules



def convert(raw: Mapping[str, object]) -> dict[str, object]:
    """Converts the class that a configuration names.

    Args:
        raw: The fields of config.json.

    Returns:
        The program as `stored.read` takes it.

    Raises:
        UnsupportedError: the class cannot be converted; the message names the module and the node.
    """
    architecture = ModelConfig(dict(raw), "config.json").architecture
    transformers.utils.logging.set_verbosity_error()
    try:
        kind = class_of(architecture)
        config = config_of(kind, raw)
        model = build(kind, config)
        program = _program(model, architecture)
        verify(kind, config, program.spec, lambda module: _program(module, architecture).spec)
        return stored.written(program, model.config, sorted(Names(model).tied), model.base_model_prefix)
    except Refusal as refusal:
        raise refusal.error(architecture) from refusal


def _program(model: Any, architecture: str) -> Model:
    """The program of a module."""
    config = model.config.get_text_config()
    fields = stored.fields_of(config) | {"architectures": [architecture]}
    m = Model(ModelConfig(fields, "config.json"), None, Source(), "checkpoint")
    names = Names(model)
    Walk(trace(model), model, m, names).run()
    tidy(m.spec)
    return m
