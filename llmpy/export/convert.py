"""Converts a class of transformers to a program: traces it, walks the graph, and compares the program with the class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers

from ..models.blocks import Model
from ..models.config import ModelConfig
from ..models.interpret import Interpreter
from ..models.source import Source
from . import arithmetic, attention, ends, layout, mixture, stored
from .names import Names
from .refusal import Refusal
from .tidy import tidy
from .trace import build, class_of, config_of, randomise, trace
from .walk import Walk

RULES = (arithmetic, attention, ends, layout, mixture)  # importing them registers their rules

LENGTHS = (1, 7, 33)
TOLERANCE = 1e-4  # of the largest logit


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
        _verify(kind, config, program)
        return stored.written(program, model.config, _ignored(program, model), model.base_model_prefix)
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


def _ignored(program: Model, model: Any) -> list[str]:
    """Tensors that a checkpoint may hold beside those of the program: what is tied to another one."""
    return sorted(Names(model).tied)


def _verify(kind: Any, config: Any, program: Model) -> None:
    """Compares the program with the class, both with the same random parameters; Refusal if they differ."""
    for scale in (1.0, 3.0):
        model = build(kind, config)
        randomise(model, scale)
        weights = _checkpoint(model)
        interpreter = Interpreter(program.spec, lambda name, shape: weights[name].reshape(shape))  # noqa: B023
        for n in LENGTHS:
            ids = np.random.default_rng(n).integers(0, program.spec["vocab_size"], n)
            with torch.no_grad():
                wanted = model(torch.from_numpy(ids)[None], use_cache=False).logits[0].double().numpy()
            difference = float(np.abs(interpreter.logits(ids.tolist()) - wanted).max() / max(np.abs(wanted).max(), 1e-30))
            if not difference <= TOLERANCE:
                raise Refusal(f"the program differs from the class: {difference:.1e} of the largest logit for {n} tokens")


def _checkpoint(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a checkpoint of this module."""
    from transformers.core_model_loading import revert_weight_conversion

    found = revert_weight_conversion(model, dict(model.state_dict()))
    return {name: tensor.detach().numpy() for name, tensor in found.items()}
