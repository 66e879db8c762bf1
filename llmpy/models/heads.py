"""The end of a decoder: logits, states, or the head of a classifier or reward model."""

from .blocks import Model, Value
from .config import ModelConfig

_ENDS = ("ForCausalLM", "Model", "ForSequenceClassification", "ForTokenClassification")


def names(family: str) -> list[str]:
    """The names of a family's architectures that `head` supports."""
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
    """Ends a program by the suffix of the architecture's name.

    Args:
        cfg: The configuration.
        m: The program.
        x: The last norm's output.
        stem: Prefix of the body's tensor names.
        scale, softcap, bias, padded, unit_rows: As in `Model.logits`; scale or softcap None: the family does not have it.
        embedding: Module name of the embedding, after the stem.
        name: Module name of the head.

    Raises:
        UnsupportedError: the configuration scales or caps the logits, but the family does not have that.
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
        m.logits(x, name, tied_to=tied, scale=scale, softcap=softcap, bias=bias, padded=padded, unit_rows=unit_rows)
