"""Quantisation at load: which matrices of a program a scheme rounds, and to which stored type (docs/use/quantization.md)."""

from collections.abc import Callable, Collection

from ..errors import ConfigError
from .program import Spec, Tensors, Weight

OWN = {"fp8": "fp8", "int8": "int8_g128", "int4": "int4_g128", "int4_g32": "int4_g32"}
BLOCKS = {"q8_0": 32, "q6_k": 256, "q5_0": 32, "q4_k": 256, "q4_1": 32, "q4_0": 32, "nf4": 64}
"""The types of other engines, which have whole blocks only, and the columns of a block."""
NARROW = {"q6_k": "q8_0", "q5_k": "q5_1", "q4_k": "q5_0", "q2_k": "q4_0"}
"""The types of matrices whose columns are no multiple of 256, as in llama.cpp."""
SCHEMES = OWN | {name: name for name in BLOCKS}
"""The values of `quantization`, and the types that they store."""
LEAST = 32
"""A matrix whose tensor has fewer rows or columns stays in floats."""

_FLOATS = ("float64", "float32", "float16", "bfloat16")
LINEARS = ("linear", "experts", "experts_up", "experts_down")
"""The operations whose matrices are quantised at load."""


def mark(spec: Spec, tensors: Tensors | None, scheme: str, method: str = "") -> None:
    """Marks the matrices that are quantised at load: linears and experts, but no head, embedding or router.

    Args:
        spec: A program; its weights are changed.
        tensors: The checkpoint's tensors; None for dummy weights.
        scheme: One of SCHEMES.
        method: The `quant_method` of the checkpoint, for messages; "": none.

    Raises:
        ConfigError: the checkpoint is quantised by another scheme, or no matrix has whole blocks.
    """
    wanted = SCHEMES[scheme]
    matrices = matrices_of(spec, LINEARS)
    types = {tensors[part.source][0] for weight in matrices for part in weight["parts"]} if tensors else set()
    stored = sorted(types - set(_FLOATS))
    if any(each.partition("_g")[0] != wanted.partition("_g")[0] for each in stored):
        raise ConfigError(
            f"quantization={scheme!r} needs weights of floats or of the same scheme; the checkpoint has "
            f"{method and f'{method}: '}{', '.join(stored)}. "
            "Leave quantization out, or load a checkpoint of floats.",
            option="quantization",
            value=scheme,
        )
    types_of = {id(weight): _fitting(wanted, weight["cols"]) for weight in matrices}
    if matrices and not any(types_of.values()):
        raise ConfigError(
            f"quantization={scheme!r} needs columns in multiples of {BLOCKS[NARROW.get(wanted, wanted)]}; the model's linears "
            f"have {', '.join(sorted({str(weight['cols']) for weight in matrices}))}. Choose another scheme.",
            option="quantization",
            value=scheme,
        )
    for weight in matrices:
        if not stored and (kind := types_of[id(weight)]):
            weight["quantised"] = kind


def _fitting(wanted: str, cols: int) -> str:
    """The type of a matrix; "": floats, because no block fits."""
    kinds = (wanted, NARROW.get(wanted, wanted))
    return next((kind for kind in kinds if cols % BLOCKS.get(kind, 1) == 0), "")


def mark_dummies(spec: Spec, type_of: Callable[[str], str]) -> None:
    """Marks the dummy matrices that a checkpoint would hold quantised.

    Args:
        spec: A program; its weights are changed.
        type_of: The type of a module's weight; "": floats.
    """
    for weight in matrices_of(spec, LINEARS):
        types = {type_of(part.source.removesuffix(".weight")) for part in weight["parts"]}
        if len(types) == 1 and (wanted := types.pop()):
            weight["quantised"] = wanted


def matrices_of(spec: Spec, operations: Collection[str]) -> list[Weight]:
    """The matrices that only these operations use, without small ones.

    Args:
        spec: A program.
        operations: Names of operations.
    """
    others: set[int] = set()
    meant: set[int] = set()
    for name, operands in spec["ops"]:
        (meant if name in operations else others).update(operands["weights"])
    return [weight for number, weight in enumerate(spec["weights"]) if number in meant - others and _is_large(weight)]


def _is_large(weight: Weight) -> bool:
    if weight["kind"] != "matrix" or weight["unit_rows"]:
        return False
    return weight["cols"] >= LEAST and all(_rows(part.shape, weight["cols"]) >= LEAST for part in weight["parts"])


def _rows(shape: tuple[int, ...], cols: int) -> int:
    """Rows of a whole tensor, so that every rank decides alike."""
    n = 1
    for size in shape:
        n *= size
    return n // cols
