"""From a configuration of transformers to the traced graph of its model."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
import transformers
from transformers.initialization import no_init_weights

from .leaves import prepare
from .refusal import Refusal

LONGEST = 4096  # tokens; the trace holds for every length up to this one


class Wrapped(torch.nn.Module):
    """A causal language model as a function of ids and a mask of ones."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        """The logits."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, return_dict=True).logits


def class_of(name: str) -> Any:
    """The class of transformers with this name.

    Raises:
        Refusal: the installed transformers has no such class, or it does not generate text.
    """
    found: Any = getattr(transformers, name, None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if not is_model:
        raise Refusal(f"transformers {transformers.__version__} has no class of this name (its own code is not run)")
    if not found.can_generate():
        raise Refusal(f"{name} of transformers does not generate text")
    return found


def config_of(kind: Any, raw: Mapping[str, object]) -> Any:
    """The configuration object of a class, from the fields of config.json."""
    config = kind.config_class.from_dict({**raw})
    if config.is_encoder_decoder:
        raise Refusal("an encoder beside the decoder")
    return config


def build(kind: Any, config: Any) -> Any:
    """A model whose parameters are memory that is never touched: they have no values."""
    with no_init_weights():
        model = kind._from_config(deepcopy(config), attn_implementation="eager", dtype=torch.float32)
    model.tie_weights()
    return model.eval()


def randomise(model: Any, scale: float) -> None:
    """Gives every parameter, and every buffer that checkpoints hold, random values that hide no term."""
    random = torch.Generator().manual_seed(1)
    saved = set(model.state_dict())
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for name in sorted(saved & set(tensors)):
        tensor = tensors[name]
        if tensor.is_floating_point():
            centre, spread = (0.0, 0.1) if tensor.ndim > 1 or "bias" in name else (0.5, 0.2)
            with torch.no_grad():
                tensor.copy_(centre + scale * spread * torch.randn(tensor.shape, generator=random))


def trace(model: Any) -> Any:
    """The graph of a model for every length."""
    prepare(model)
    ids = torch.arange(3, 14)[None] % model.config.get_text_config().vocab_size
    longest = getattr(model.config, "max_position_embeddings", None) or LONGEST
    n = torch.export.Dim("n", min=2, max=max(min(longest, LONGEST), 12))
    shapes = {"input_ids": {1: n}, "attention_mask": {1: n}}
    try:
        with torch.no_grad():
            return torch.export.export(Wrapped(model), (ids, torch.ones_like(ids)), dynamic_shapes=shapes, strict=False)
    except Refusal:
        raise
    except Exception as error:
        if isinstance(cause := error.__cause__ or error.__context__, Refusal):
            raise cause from error
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise Refusal(f"torch.export cannot trace it: {type(error).__name__}: {first[:300]}", _frame(error)) from error


def _frame(error: BaseException) -> str:
    """The place in transformers' code where an error was raised."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "transformers/models" in file:
            found = f"{trace.tb_frame.f_code.co_qualname} at {file.rsplit('/', 1)[-1]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
