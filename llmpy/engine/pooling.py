"""Embeddings, classes and rewards of prompts: chooses the states that the core pools and turns them into outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import refuse_names
from ..errors import InvalidRequestError, LlmpyError, NonFiniteLogitsError, UnsupportedError
from ..inputs import Prompt
from ..json_files import read_json
from ..pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingOutputs,
    PoolingRequestOutput,
)
from ..pooling_params import PoolingParams
from ..results.samples import NO_FLOATS, NO_IDS
from ..sampling_params import RequestOutputKind, SamplingParams
from .calls import Submission, run
from .frontend import Frontend, at
from .requests import Request

if TYPE_CHECKING:
    from pathlib import Path

    from .._core import CoreOutput
    from ..hub import ModelFiles
    from ..logprobs import Floats
    from ..models import Compiled
    from ..results.samples import Sample
    from .driver import Driver
    from .progress import UseTqdm

TASKS = ("embed", "token_embed", "classify", "token_classify")
_WHAT = {
    "embed": "embedding",
    "token_embed": "embedding",
    "classify": "classification",
    "token_classify": "classification",
    "generate": "generative",
}
_MODES = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}
_ACTIVATIONS = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
NO_SAMPLING = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)


@dataclass(frozen=True)
class Pooler:
    """The pooling tasks of a model and their defaults.

    Args:
        tasks: The tasks, from TASKS.
        generates: Whether the model generates.
        pooling: The model's default kind of pooling.
        normalize: Whether embeddings are scaled to length 1.
        activation: Activation of scores: "softmax", "sigmoid" or "identity".
        problem: Why embeddings are not supported; None: they are.
        width: Elements of a row of states.
        takes_whole_prompts: Whether a prompt must be computed in one step.
        labels: Names of a classifier's classes.
        has_token_types: Whether tokens have types.
    """

    tasks: tuple[str, ...] = ()
    generates: bool = True
    pooling: str = "last"
    normalize: bool = True
    activation: str = "softmax"
    problem: str | None = None
    width: int = 0
    takes_whole_prompts: bool = False
    labels: tuple[str, ...] = ()
    has_token_types: bool = False

    def check(self, task: str, call: str) -> None:
        """Raises UnsupportedError unless the model has the task."""
        if not (self.generates if task == "generate" else task in self.tasks):
            raise UnsupportedError(f"{call} is only supported for {_WHAT[task]} models.")
        if self.problem is not None and task == "embed":
            raise UnsupportedError(self.problem)


def pooler_of(files: ModelFiles, compiled: Compiled) -> Pooler:
    """The Pooler of a model, from its architecture, configuration and files of sentence-transformers."""
    pooling, normalize, problem = compiled.pooling, True, None
    if "embed" in compiled.tasks and files.directory is not None and (files.directory / "modules.json").is_file():
        pooling, normalize, problem = _sentence_transformer(files.directory, pooling)
    labels = compiled.config.num_labels if "token_classify" in compiled.tasks or "classify" in compiled.tasks else 0
    activation = _ACTIVATIONS.get(str(compiled.config.raw.get("problem_type")), "sigmoid" if labels == 1 else "softmax")
    last = compiled.spec["ops"][-1][1]["in"][0]
    width = compiled.spec["values"][last][0]
    whole = any(name == "row_attention" for name, _ in compiled.spec["ops"])
    typed = compiled.config.raw.get("type_vocab_size", 1) != 1
    names = _labels(compiled.config.raw.get("id2label"), labels)
    return Pooler(compiled.tasks, compiled.generates, pooling, normalize, activation, problem, width, whole, names, typed)


def _labels(named: object, count: int) -> tuple[str, ...]:
    """Names of the classes."""
    known = named if isinstance(named, Mapping) else {}
    return tuple(str(known.get(str(i), f"LABEL_{i}")) for i in range(count))


def _sentence_transformer(directory: Path, default: str) -> tuple[str, bool, str | None]:
    """Kind of pooling, whether embeddings have length 1, and the unsupported feature or None."""
    pooling, normalize, problem = default, False, None
    for module in read_json(directory / "modules.json", list):
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, Mapping) else "?"
        if kind == "Pooling":
            file = directory / str(module.get("path", "")) / "config.json"
            pooling, problem = _pooling_of(read_json(file), file, problem)
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            problem = f"{directory}/modules.json: module {kind!r} is not supported; pooling_task='token_embed' gives the states"
    return pooling, normalize, problem


def _pooling_of(config: Mapping[str, Any], file: Path, problem: str | None) -> tuple[str, str | None]:
    """The kind of pooling that a Pooling module's configuration enables."""
    modes = [
        name.removeprefix("pooling_mode_") for name, on in config.items() if name.startswith("pooling_mode_") and on is True
    ]
    given = config.get("pooling_mode")
    modes += [given] if isinstance(given, str) else list(given or ())
    kinds = [_MODES.get(mode, mode) for mode in modes]
    if len(kinds) == 1 and kinds[0] in ("cls", "mean", "last") and config.get("include_prompt", True) is True:
        return kinds[0], problem
    return "mean", f"{file}: pooling {'+'.join(kinds) or 'of no kind'} is not supported; pass pooling= 'last', 'cls' or 'mean'"


# ---- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wish:
    """The pooling that one request wants, with the model's defaults filled in.

    Args:
        task: One of TASKS.
        call: The method called: "embed", "classify" or "encode".
        kind: Kind of pooling.
        normalize, dimensions: Options of an embedding.
        activation: As in Pooler.
    """

    task: str
    call: str
    kind: str
    normalize: bool = False
    dimensions: int | None = None
    activation: str = "identity"


def wish(pooler: Pooler, name: str, call: str, task: object, params: object) -> Wish:
    """The Wish of a call, checked against the model.

    Args:
        pooler: The model's Pooler.
        name: Name of the engine's class, for messages.
        call, task: As in Wish; a task of None is missing.
        params: PoolingParams, or None for the model's defaults.
    """
    if params is not None and not isinstance(params, PoolingParams):
        raise TypeError(f"pooling_params must be PoolingParams or a list of them, but is of type {type(params).__name__}")
    if task is None:
        raise InvalidRequestError(f"pooling_task is required; one of {', '.join(TASKS)}", parameter="pooling_task")
    if not isinstance(task, str) or task not in TASKS:
        message = f"pooling_task must be one of {', '.join(map(repr, TASKS))}, got {task!r}."
        raise InvalidRequestError(message, parameter="pooling_task", value=task)
    given = params or PoolingParams()
    shown = f"{name}.encode(pooling_task={task!r})" if call == "encode" else f"{name}.{call}()"
    if given.pooling is None or task not in pooler.tasks:
        pooler.check(task, shown)
    embeds = task.endswith("embed")
    for field in ("use_activation",) if embeds else ("normalize", "dimensions"):
        if getattr(given, field) is not None:
            raise InvalidRequestError(f"{field} does not apply to {shown}", parameter=field, value=getattr(given, field))
    kind = given.pooling or ("all" if task.startswith("token_") else pooler.pooling)
    if task.startswith("token_") != (kind == "all"):
        wanted = "'all'" if task.startswith("token_") else "'last', 'mean' or 'cls'"
        raise InvalidRequestError(f"pooling must be {wanted} for {shown}, got {kind!r}.", parameter="pooling", value=kind)
    if embeds:
        normalize = pooler.normalize if given.normalize is None else given.normalize
        return Wish(task, call, kind, normalize, given.dimensions)
    return Wish(task, call, kind, activation="identity" if given.use_activation is False else pooler.activation)


def params_of(params: Any, fields: Mapping[str, Any], call: str) -> Any:
    """The given parameters, or new ones from fields by name."""
    if fields and params is not None:
        raise TypeError(f"pass pooling_params or fields by name ({', '.join(fields)}), not both")
    known = PoolingParams.__dataclass_fields__
    refuse_names(call, [name for name in fields if name not in known], known)
    return PoolingParams(**fields) if fields else params


class PoolingRequest(Request):
    """A request for pooled states of its prompt."""

    wish: Wish
    _states: bytes | None = None

    def absorb(self, output: CoreOutput) -> None:
        """Adds an update from the core."""
        self._states = output["states"] if self._states is None else self._states
        super().absorb(output)
        if isinstance(self.error, NonFiniteLogitsError):
            message = f"states at position {self.error.position}: wanted finite numbers, have NaN or inf; try dtype='float32'"
            self.error = NonFiniteLogitsError(message, position=self.error.position)

    def _absorb_sample(self, sample: Sample, output: CoreOutput) -> None:
        sample.finish = output["finish"]

    def result(self) -> PoolingRequestOutput[Any]:
        """The output."""
        ids = NO_IDS if self.prompt.ids is None else self.prompt.ids
        values = NO_FLOATS
        if self._states is not None:
            values = finish(np.frombuffer(self._states, np.float32), self.wish, len(ids))
        common: dict[str, Any] = {
            "request_id": self.request_id,
            "index": self.index,
            "prompt": self.prompt.text,
            "prompt_token_ids_array": ids,
            "num_cached_tokens": self.num_cached_tokens,
            "weight_version": self.version,
            "error": self.failure,
            "finished": self.finished and self._states is not None,
        }
        if self.wish.call == "embed":
            return EmbeddingRequestOutput(outputs=EmbeddingOutput(embedding=values), **common)
        if self.wish.call == "classify":
            return ClassificationRequestOutput(outputs=ClassificationOutput(probs=values), **common)
        return PoolingRequestOutput(outputs=PoolingOutput(data=values), **common)


def finish(states: Floats, wanted: Wish, length: int) -> Floats:
    """Cuts rows of states, scales them to length 1, or applies the activation. Each row is computed alone, in float64.

    Args:
        states: float32, one row or `length` consecutive rows.
        wanted: The request's Wish.
        length: Tokens of the prompt.
    """
    rows = states.reshape(length if wanted.kind == "all" else 1, -1)[:, : wanted.dimensions].astype(np.float64)
    if wanted.normalize:
        lengths = np.sqrt((rows * rows).sum(-1, keepdims=True))
        rows = rows / np.maximum(lengths, 1e-12)
    elif wanted.activation == "softmax":
        rows = np.exp(rows - rows.max(-1, keepdims=True))
        rows = rows / rows.sum(-1, keepdims=True)
    elif wanted.activation == "sigmoid":
        rows = 0.5 * (1 + np.tanh(0.5 * rows))
    result: Floats = rows.astype(np.float32)
    result = result if wanted.kind == "all" else result[0]
    result.setflags(write=False)
    return result


def request_of(frontend: Frontend, prompt: Prompt | LlmpyError, wanted: Wish, index: int = 0) -> Submission:
    """A request with its core parameters; a bad request carries its error instead."""
    known = prompt if isinstance(prompt, Prompt) else Prompt(None, None)
    ordinal, _ = frontend.next_seed()
    request = PoolingRequest(str(ordinal), index, known, NO_SAMPLING, "raw_logprobs", 0, frontend.context)
    request.wish = wanted
    core: dict[str, Any] = {"seed": 0, "pooling": wanted.kind}
    try:
        if isinstance(prompt, LlmpyError):
            raise prompt
        _check(frontend, prompt, wanted)
        core = frontend.translator.prompt_params(request, core)
    except LlmpyError as error:
        request.fail(at(error, index))
    return request, core


def _check(frontend: Frontend, prompt: Prompt, wanted: Wish) -> None:
    if prompt.prior is not None:
        raise InvalidRequestError(f"{wanted.call}() takes prompts, not output_token_ids", parameter="output_token_ids")
    frontend.check_length(prompt, room=0)
    most = frontend.config.max_num_batched_tokens or 0
    if frontend.pooler.takes_whole_prompts and prompt.ids is not None and len(prompt.ids) > most:
        raise InvalidRequestError(
            f"The prompt (length {len(prompt.ids)}) is longer than max_num_batched_tokens={most}, and this model takes whole "
            "prompts. Raise it.",
            parameter="prompt",
            value=len(prompt.ids),
        )
    width = frontend.pooler.width
    if wanted.dimensions is not None and wanted.dimensions > width:
        message = f"dimensions must be at most {width}, the model's, got {wanted.dimensions}."
        raise InvalidRequestError(message, parameter="dimensions", value=wanted.dimensions)


def pool(
    driver: Driver, submissions: Sequence[Submission], use_tqdm: UseTqdm, on_error: str
) -> PoolingOutputs[PoolingRequestOutput[Any]]:
    """Results of all prompts in order. The caller has claimed the engine."""

    def collect() -> PoolingOutputs[PoolingRequestOutput[Any]]:
        return PoolingOutputs(request.result() for request, _ in submissions if isinstance(request, PoolingRequest))

    return run(driver, submissions, use_tqdm, on_error, collect)
