"""How a decoder ends: with a vocabulary, with its states, or with a classifier's or reward model's head."""

from .blocks import Model, Value
from .config import ModelConfig

_ENDS = ("ForCausalLM", "Model", "ForSequenceClassification", "ForTokenClassification")


def names(family: str) -> list[str]:
    """The architectures of a family that `head` can end."""
    return [family + end for end in _ENDS]


def head(
    cfg: ModelConfig,
    m: Model,
    x: Value,
    stem: str,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: bool = False,
    padded: int = 1,
    unit_rows: bool = False,
    embedding: str = "embed_tokens",
    name: str = "lm_head",
) -> None:
    """Ends a program as the name of the architecture says.

    Args:
        cfg: The configuration.
        m: The program.
        x: The last norm's output.
        stem: What the names of the body's tensors begin with.
        scale, softcap, bias, padded, unit_rows: Of a vocabulary's logits, as in `Model.logits`; None: the family has no such
            thing.
        embedding: Module name of the embedding, behind the stem.
        name: Module name of the head.

    Raises:
        UnsupportedError: the configuration scales or caps the logits of a family that has no such thing.
    """
    end = cfg.architecture
    if end.endswith(("ForSequenceClassification", "ForTokenClassification")):
        m.leave_out(name)
        is_sequence = end.endswith("ForSequenceClassification")
        labels = m.linear(x, "score", cfg.num_labels, bias=not is_sequence)
        m.states(labels, *(["classify"] if is_sequence else []), "token_classify")
    elif end.endswith("Model") and not end.endswith("LMHeadModel"):
        m.leave_out(name)
        m.states(x)
    else:
        if softcap is None:
            cfg.without("final_logit_softcapping")
        for field in ("logits_scaling", "logit_scale") if scale is None else ():
            cfg.only(field, 1.0)
        scale, softcap, tied = scale or 1.0, softcap or 0.0, f"{stem}{embedding}"
        m.logits(
            x, name, tied_to=tied, scale=scale, softcap=softcap, bias=bias, padded=padded, unit_rows=unit_rows
        )
