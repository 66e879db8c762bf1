"""`llmpy compare`: compares a model module by module with transformers and prints the first difference."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InvalidRequestError, UnsupportedError
from .common import model_path

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .. import LLM

    Rows = NDArray[np.float32]

TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
ROUNDED_TOLERANCE = 1e-1  # activations are rounded to 8 bits before each product


class Difference(NamedTuple):
    """The difference of one value between llmpy and transformers.

    Attributes:
        name: Module of the value.
        error: Largest difference divided by the largest magnitude.
        token: Token with the largest difference.
    """

    name: str
    error: float
    token: int


def run(chosen: Namespace) -> int:
    """Compares and prints; returns 1 if a value differs."""
    torch, transformers = _libraries()
    from .. import LLM

    model, given = model_path(chosen), None if chosen.ids is None else _parsed(chosen.ids)
    length = chosen.max_model_len
    options = {"device": chosen.device, "dtype": chosen.dtype, "max_model_len": length, "enforce_eager": True}
    options["activation_dtype"] = chosen.activation_dtype
    with LLM(model, **options, skip_tokenizer_init=given is not None) as llm:
        (ids,) = (one.tolist() for one, _ in llm._tap.prompts(chosen.prompt if given is None else [given]))
        bound = _tolerance(llm) if chosen.tolerance is None else chosen.tolerance
        theirs = _reference(torch, transformers, str(model), ids)
        print(f"{llm!r}\n{len(ids)} tokens; transformers {transformers.__version__} in float32; tolerance {bound:g}")
        found, skipped = list(differences(llm, theirs, ids)), uncompared(llm, theirs)
    return _report(found, skipped, bound, chosen.all)


def _tolerance(llm: LLM) -> float:
    """The largest difference that rounding can cause."""
    bound = TOLERANCES.get(str(llm.config.dtype), 1e-1)
    return max(bound, ROUNDED_TOLERANCE) if llm.config.activation_dtype in ("int8", "fp8") else bound


def _parsed(text: str) -> list[int]:
    """The numbers of --ids."""
    words = text.replace(",", " ").split()
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None or not words:
        have = "nothing" if wrong is None else repr(wrong)
        raise InvalidRequestError(f"--ids: wanted token ids with commas between them, have {have}", parameter="ids", value=text)
    return [int(word) for word in words]


def _libraries() -> tuple[Any, Any]:
    """torch and transformers."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UnsupportedError(f"compare needs torch and transformers ({error}): pip install torch transformers") from None
    told: Any = transformers.utils.logging
    told.disable_progress_bar()
    told.set_verbosity_error()
    return torch, transformers


def _reference(torch: Any, transformers: Any, model: str, ids: list[int]) -> dict[str, Rows]:
    """The output of every module of transformers' model by its name, and "logits"."""
    import numpy as np

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if str(model).endswith(".gguf"):
        from pathlib import Path

        options["gguf_file"] = Path(model).name
        model = str(Path(model).parent)
    try:
        own = transformers.AutoConfig.from_pretrained(model, **{key: options[key] for key in options if key == "gguf_file"})
        if own.model_type == "falcon" and own.alibi:  # its eager attention adds the slopes twice
            options["attn_implementation"] = "sdpa"
        theirs = transformers.AutoModelForCausalLM.from_pretrained(model, **options).eval()
    except (ValueError, KeyError) as error:
        raise UnsupportedError(
            f"compare: transformers {transformers.__version__} reads no {model}, so there is nothing beside it: {error}"
        ) from error
    found: dict[str, Rows] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, given: Any, result: Any) -> None:
            value = result[0] if isinstance(result, tuple) else result
            if not isinstance(value, torch.Tensor) or value.is_complex():  # tables of rope may be complex
                return
            if value.ndim >= 2 and value.shape[0] == 1 and value.shape[1] == len(ids):
                found.setdefault(name, value[0].detach().float().reshape(len(ids), -1).numpy().copy())
            elif value.ndim == 4 and value.shape[2] == len(ids):  # heads before tokens
                rows = value[0].transpose(0, 1).detach().float()
                found.setdefault(name, rows.reshape(len(ids), -1).numpy().copy())

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in theirs.named_modules() if name]
    with torch.no_grad():
        out = theirs(torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    found["logits"] = np.asarray(out.logits[0].float().numpy())
    return found


def differences(llm: LLM, theirs: dict[str, Rows], ids: list[int]) -> Iterator[Difference]:
    """The differences of all values that both models have, in llmpy's order of computation."""

    scales, named = _embedding_scales(llm), llm._tap.named()
    operations = {one.name: one.op for one in named}
    layers = {one.name for one, before in zip(named[1:], named, strict=False) if one.value == before.value}
    alike = _modules(llm) | layers | {"logits"}
    paired = {one.name: _paired(llm).get(one.value, 0) for one in named}
    names = [one.name for one in named if one.name in theirs and one.name in alike]
    for first in range(0, len(names), 64):
        part = names[first : first + 64]
        for name, mine in llm.tap([ids], list(part))[0].items():
            want = _ordered(llm, operations[str(name)], theirs[str(name)])
            if want.shape != mine.shape:
                continue
            if paired[str(name)]:
                want = _in_pairs(want, paired[str(name)])
            factor = scales.get(str(name), 1.0)
            if name in layers:  # some families divide the rows between layers by a factor
                factor = float((mine * want).sum() / max(float((want * want).sum()), 1e-30)) or 1.0
            both = [_difference(str(name), mine / each, want) for each in (1.0, factor)]
            yield min(both, key=lambda one: one.error)


def _modules(llm: LLM) -> set[str]:
    """Names of values that are outputs of modules with weights, except norms whose module in transformers includes the gate."""
    ops = llm._tap.spec["ops"]
    gated = {op["in"][1] for kind, op in ops if kind == "gated"}
    weighed = {i for i, (kind, op) in enumerate(ops) if op["weights"] and not (kind == "rms_norm" and op["out"][0] in gated)}
    return {one.name for one in llm._tap.named() if one.op in weighed}


def _ordered(llm: LLM, number: int, rows: Rows) -> Rows:
    """A module's output, reordered like the rows of its tensor in llmpy's weight."""
    import numpy as np

    kind, op = llm._tap.spec["ops"][number]
    parts = llm._tap.spec["weights"][op["weights"][0]]["parts"] if kind == "linear" else []
    if not parts or len({part.name for part in parts}) > 1:
        return rows
    each = [(np.arange(part.rows), part) for part in parts]
    places = np.concatenate([part.base + r // part.inner * part.stride + r % part.inner for r, part in each])
    return rows[:, places] if places.max() < rows.shape[1] else rows


def _paired(llm: LLM) -> dict[int, int]:
    """Values of heads with rows in pairs in GGUF files but in halves in checkpoints (for rope) -> size of a head."""
    spec = llm._tap.spec
    if not any(order.heads for order in spec["moved"].values()):
        return {}
    turned = [op for kind, op in spec["ops"] if kind == "rope" and spec["ropes"][int(op["attributes"]["rope"])]["interleaved"]]
    return {value: int(op["attributes"]["head_dim"]) for op in turned for value in op["in"]}


def _in_pairs(rows: Rows, head_dim: int) -> Rows:
    """Reorders heads from halves to pairs: elements alternate between the two halves."""
    heads = rows.reshape(len(rows), -1, 2, head_dim // 2)
    return heads.swapaxes(2, 3).reshape(rows.shape)


def _difference(name: str, mine: Rows, want: Rows) -> Difference:
    """The difference of one value; elements that are not finite differ by infinity."""
    import numpy as np

    wrong = np.nan_to_num(np.abs(mine.astype(np.float64) - want), nan=np.inf)
    return Difference(name, float(wrong.max() / (float(np.abs(want).max()) or 1.0)), int(wrong.max(-1).argmax()))


def uncompared(llm: LLM, theirs: dict[str, Rows]) -> list[str]:
    """Modules with weights that transformers' model does not have with this name and shape."""
    spec = llm._tap.spec
    weighed = {i for i, (_, op) in enumerate(spec["ops"]) if max(op["weights"][:1], default=-1) >= 0}
    widths = {one.name: llm._tap.width(one) for one in llm._tap.named() if one.op in weighed}
    have = {name: rows.shape[1] for name, rows in theirs.items()}
    return [name for name, width in widths.items() if "|" not in name and have.get(name) != width]


def _embedding_scales(llm: LLM) -> dict[str, float]:
    """Factors of embeddings; transformers applies them in the module or after it."""
    ops = llm._tap.spec["ops"]
    return {one.name: ops[one.op][1]["attributes"]["scale"] for one in llm._tap.named() if ops[one.op][0] == "embed"}


def _report(found: list[Difference], skipped: list[str], bound: float, shows_all: bool) -> int:
    """Prints the table and the result; returns the exit status."""
    first = next((one for one in found if not one.error <= bound), None)
    width = max((len(one.name) for one in found), default=0)
    for one in found:
        if shows_all or one == first or one.name == "logits" or one.name.count(".") == 2:
            mark = "  <- differs" if not one.error <= bound else ""
            print(f"  {one.name:{width}}  {one.error:9.2e}  worst at token {one.token}{mark}")
    if skipped:
        more = f" and {len(skipped) - 8} more" if len(skipped) > 8 else ""
        print(f"not compared, transformers has no module of this name and shape: {', '.join(skipped[:8])}{more}")
    if first is None:
        print(f"no difference above {bound:g} in {len(found)} values")
        return 0
    print(f"first difference: {first.name}, {first.error:.2e} of the largest value, at token {first.token}")
    return 1
