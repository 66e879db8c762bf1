"""Implements the calls of LLM: generation for many prompts, scores, streams."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..errors import EngineBusyError, InvalidRequestError, LlmpyError, RequestFailedError, interrupted
from ..inputs import Prompt
from ..outputs import Chunk, RequestOutput, RequestOutputs, ScoreOutput, ScoreOutputs
from .frontend import Frontend, at
from .progress import Progress
from .requests import Request, ScoreRequest

if TYPE_CHECKING:
    from ..pooling_outputs import PoolingOutputs
    from ..results.beam_search import BeamSearchOutput
    from ..sampling_params import SamplingParams
    from .adapters import Chosen
    from .driver import Driver
    from .progress import UseTqdm

Submission = tuple[Request, dict[str, Any]]
Output = TypeVar("Output", RequestOutput, ScoreOutput)
AnyOutputs: TypeAlias = "RequestOutputs | ScoreOutputs | PoolingOutputs[Any] | list[BeamSearchOutput]"
Outputs = TypeVar("Outputs", bound=AnyOutputs)


def with_adapters(prompts: list[Prompt | LlmpyError], adapters: Iterable[Chosen | None]) -> list[Prompt | LlmpyError]:
    """The same prompts; each has its adapter."""
    for prompt, adapter in zip(prompts, adapters, strict=True):
        if isinstance(prompt, Prompt):
            prompt.adapter = adapter
    return prompts


def prepare(
    frontend: Frontend,
    prompts: Sequence[Prompt | LlmpyError],
    params: Sequence[SamplingParams],
    priorities: Sequence[int],
) -> list[Submission]:
    """Requests with their core parameters; a bad request carries its error instead."""
    translated: dict[int, dict[str, Any]] = {}
    submissions = []
    for index, (prompt, param, priority) in enumerate(zip(prompts, params, priorities, strict=True)):
        request = new_request(frontend, prompt, param, index)
        core: dict[str, Any] = {}
        try:
            if isinstance(prompt, LlmpyError):
                raise prompt
            frontend.check(prompt, param, priority)
            if id(param) not in translated:
                translated[id(param)] = frontend.translator.core_params(param)
            core = frontend.translator.prompt_params(request, translated[id(param)], priority)
        except LlmpyError as error:
            request.fail(at(error, index))
        submissions.append((request, core))
    return submissions


def new_request(
    frontend: Frontend, prompt: Prompt | LlmpyError, params: SamplingParams, index: int = 0, queued: bool = False
) -> Request:
    """A request with its seed. It is not submitted."""
    ordinal, seed = frontend.next_seed()
    known = prompt if isinstance(prompt, Prompt) else Prompt(None, None)
    seed = seed if params.seed is None else params.seed
    mode = frontend.translator.mode(params)
    kind = Request if params.search is None else _beam_request()
    request = kind(str(ordinal), index, known, params, mode, seed, frontend.context, queued)
    request.match_stops = bool(params.stop_strings) and not frontend.translator.core_matches_stops(params)
    return request


def _beam_request() -> type[Request]:
    from .beams import BeamRequest

    return BeamRequest


def check_submissions(submissions: Sequence[Submission], on_error: str) -> None:
    """Raises the error of the first bad request if on_error is "raise"."""
    check_on_error(on_error)
    if on_error == "raise":
        for request, _ in submissions:
            if request.error is not None:
                raise _named(request.error, request, len(submissions))


def check_on_error(on_error: str) -> None:
    """Raises if on_error is neither "raise" nor "return"."""
    if on_error not in ("raise", "return"):
        message = f"on_error must be 'raise' or 'return', got {on_error!r}."
        raise InvalidRequestError(message, parameter="on_error", value=on_error)


def _named(error: LlmpyError, request: Request, num_prompts: int) -> LlmpyError:
    """The same error with the prompt's index and first characters in its message, if there are several prompts."""
    if num_prompts > 1:
        error.args = (f"{_label(request.index, request.prompt.text)}: {error}",)
    return error


def _label(index: int, text: str | None) -> str:
    """`prompt 3 ('The capital of ...')`."""
    if text is None:
        return f"prompt {index}"
    short = text if len(text) <= 32 else text[:29] + "..."
    return f"prompt {index} ({short!r})"


def run(
    driver: Driver, submissions: Sequence[Submission], use_tqdm: UseTqdm, on_error: str, collect: Callable[[], Outputs]
) -> Outputs:
    """Submits all requests and runs steps until they end. The caller has claimed the engine.

    Args:
        driver: The engine.
        submissions: Requests; requests with an error are skipped.
        use_tqdm: As in `LLM.generate`.
        on_error: "raise" or "return".
        collect: Makes the outputs so far; an interruption carries them.

    Returns:
        The outputs that `collect` makes at the end.
    """
    check_submissions(submissions, on_error)
    return _complete(driver, [request for request, _ in submissions], use_tqdm, on_error, collect, submissions)


def _complete(
    driver: Driver,
    requests: Sequence[Request],
    use_tqdm: UseTqdm,
    on_error: str,
    collect: Callable[[], Outputs],
    submissions: Sequence[Submission] = (),
) -> Outputs:
    """Queues the submissions and runs steps until all requests end."""
    try:
        with Progress(use_tqdm, len(requests), lambda: _counts(driver)) as progress:
            _submit(driver, submissions, on_error)
            progress.update(sum(request.finished for request in requests))
            driver.finish(requests, progress.update)
    except KeyboardInterrupt:
        driver.drop(requests)
        raise interrupted(collect()) from None
    outputs = collect()
    if on_error == "raise":
        raise_failure(outputs)
    return outputs


def _submit(driver: Driver, submissions: Sequence[Submission], on_error: str) -> None:
    """Queues all requests, or none if one of them raises."""
    done: list[Request] = []
    try:
        for request, core in submissions:
            if request.finished:
                continue
            try:
                if request.match_stops:
                    request.prepare_text()
                driver.submit(request, core)
                done.append(request)
            except InvalidRequestError as error:
                if on_error == "raise":
                    raise _named(at(error, request.index), request, len(submissions)) from None
                request.fail(at(error, request.index))
    except BaseException:
        driver.drop(done)
        raise


def _counts(driver: Driver) -> tuple[int, int]:
    """Prompt and output tokens computed so far."""
    stats = driver.engine.stats()
    return int(stats["prompt_tokens"]), int(stats["generation_tokens"])


def _collector(requests: Sequence[Request]) -> Callable[[], RequestOutputs]:
    """A function that makes the outputs so far, with the time since now."""
    start = time.perf_counter()
    return lambda: RequestOutputs([request.output() for request in requests], time.perf_counter() - start)


def generate(driver: Driver, submissions: Sequence[Submission], use_tqdm: UseTqdm, on_error: str) -> RequestOutputs:
    """Outputs of all requests in order. The caller has claimed the engine."""
    return run(driver, submissions, use_tqdm, on_error, _collector([request for request, _ in submissions]))


def enqueue(driver: Driver, submissions: Sequence[Submission]) -> list[Request]:
    """Queues all requests, or none if one of them raises, and returns them. The caller has claimed the engine."""
    check_submissions(submissions, "raise")
    _submit(driver, submissions, "raise")
    return [request for request, _ in submissions]


def wait(driver: Driver, requests: Sequence[Request], use_tqdm: UseTqdm, on_error: str) -> RequestOutputs:
    """Runs queued requests to their ends; their outputs in order. The caller has claimed the engine."""
    return _complete(driver, requests, use_tqdm, on_error, _collector(requests))


def as_completed(
    driver: Driver, submissions: Sequence[Submission], use_tqdm: UseTqdm, on_error: str, keep: object
) -> Iterator[RequestOutput]:
    """Yields outputs as requests finish; outputs of one step come in the order of the prompts.

    Closing or dropping the iterator aborts the unfinished requests. The engine runs only inside `next()`.

    Args:
        driver: The engine.
        submissions: Checked requests, not yet submitted.
        use_tqdm, on_error: As in `LLM.generate`.
        keep: Lives as long as the iterator.
    """
    requests = [request for request, _ in submissions]
    pending, arrivals = dict.fromkeys(requests), _Arrivals(driver, requests)
    try:
        with Progress(use_tqdm, len(requests), lambda: _counts(driver)) as progress:
            with driver.driving():
                _submit(driver, submissions, on_error)
            touched: Iterable[Request] = requests
            while pending:
                done = sorted((one for one in touched if one.finished and one in pending), key=lambda one: one.index)
                for request in done:
                    del pending[request]
                progress.update(len(done))
                for request in done:
                    if request.error is None or on_error == "return":
                        yield request.output()
                touched = arrivals.next(pending) if pending else ()
        if on_error == "raise":
            raise_failure(RequestOutputs([request.output() for request in requests]))
    except KeyboardInterrupt:
        with contextlib.suppress(EngineBusyError), driver.driving(steps=False):
            driver.drop(pending)
        raise interrupted(RequestOutputs([request.output() for request in requests])) from None
    finally:
        for request in pending:
            if not request.finished and request.number >= 0:
                driver.forget(request)


class _Arrivals:
    """Finds which requests of a call may have finished.

    Args:
        driver: The engine.
        requests: The requests of the call.
    """

    def __init__(self, driver: Driver, requests: Sequence[Request]) -> None:
        self._driver = driver
        self._is_stepwise = any(request.match_stops for request in requests)
        self._seen = driver.deliveries

    def next(self, pending: Collection[Request]) -> Iterable[Request]:
        """Runs the engine until a pending request may have finished or a short time has passed."""
        driver = self._driver
        with driver.driving():
            if driver.deliveries != self._seen:  # another caller has run the engine meanwhile
                self._seen = driver.deliveries
                return list(pending)
            touched = driver.advance(until_finished=not self._is_stepwise)
            self._seen = driver.deliveries
            if not driver.engine.has_unfinished() and not any(request.finished for request in pending):
                raise RuntimeError(f"engine lost {len(pending)} requests")
        return touched


def score(driver: Driver, submissions: Sequence[Submission], use_tqdm: UseTqdm, on_error: str) -> ScoreOutputs:
    """Scores of all sequences in order. The caller has claimed the engine."""

    def collect() -> ScoreOutputs:
        return ScoreOutputs(request.score() for request, _ in submissions if isinstance(request, ScoreRequest))

    return run(driver, submissions, use_tqdm, on_error, collect)


def raise_failure(outputs: AnyOutputs) -> None:
    """Raises RequestFailedError if one of the requests failed, with all outputs."""
    failed = [output for output in outputs if output.error is not None]
    if failed:
        label = _label(failed[0].index, getattr(failed[0], "prompt", None))
        error = RequestFailedError(
            f"{len(failed)} of {len(outputs)} requests failed; {label}: {failed[0].error}; the outputs are in .outputs",
            outputs=outputs,
            output=failed[0],
        )
        raise error from failed[0].error


def prepare_scores(
    frontend: Frontend,
    prompts: Sequence[Prompt | LlmpyError],
    starts: Sequence[int],
    params: SamplingParams,
) -> list[Submission]:
    """Score requests with their core parameters; `params` carries temperature and logprobs."""
    submissions: list[Submission] = []
    for index, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        known = prompt if isinstance(prompt, Prompt) else Prompt(None, None)
        request = ScoreRequest(str(index), index, known, params, "raw_logprobs", 0, frontend.context)
        request.start = start
        core: dict[str, Any] = {
            "seed": 0,
            "score_start": start,
            "temperature": params.temperature,
            "logprobs": params.logprobs,
        }
        try:
            if isinstance(prompt, LlmpyError):
                raise prompt
            _check_score(frontend, prompt, start, params)
            core = frontend.translator.prompt_params(request, core)
            if prompt.ids is not None and start == len(prompt.ids):
                request.finished = True
        except LlmpyError as error:
            request.fail(at(error, index))
        submissions.append((request, core))
    return submissions


def _check_score(frontend: Frontend, prompt: Prompt, start: int, params: SamplingParams) -> None:
    if prompt.prior is not None:
        raise InvalidRequestError("score() takes whole sequences, not output_token_ids", parameter="output_token_ids")
    frontend.check_length(prompt, room=0)
    assert prompt.ids is not None
    length = len(prompt.ids)
    if not 1 <= start <= length:
        message = f"start must be in [1, {length}], the length of the sequence, got {start}."
        raise InvalidRequestError(message, parameter="start", value=start)
    frontend.check_size("logprobs", params.logprobs or 0, length)


def stream(driver: Driver, request: Request, core: dict[str, Any], keep: object) -> Iterator[Chunk]:
    """Yields the new text of one request, step by step. Closing or dropping the iterator aborts the request.

    Args:
        driver: The engine.
        request, core: The checked request and its core parameters; not yet submitted.
        keep: Lives as long as the iterator.
    """
    chars = tokens = 0
    shown_all = False
    try:
        with driver.driving():
            if request.match_stops:
                request.prepare_text()
            driver.submit(request, core)
        while not shown_all:
            if not request.finished:
                _advance(driver, request)
            output, shown_all = request.output(), request.finished
            sample = output.outputs[0]
            if len(sample.token_ids_array) > tokens or shown_all:
                logprobs = None if sample.token_logprobs is None else sample.token_logprobs[tokens:]
                yield Chunk(sample.text[chars:], sample.token_ids_array[tokens:].tolist(), logprobs, output)
                chars, tokens = len(sample.text), len(sample.token_ids_array)
        if request.error is not None:
            outputs = RequestOutputs([request.output()])
            raise RequestFailedError(f"request failed: {request.error}", outputs=outputs, output=outputs[0]) from request.error
    finally:
        if not request.finished and request.number >= 0:
            driver.forget(request)


def _advance(driver: Driver, request: Request) -> None:
    """Runs steps until the request has new output."""
    with driver.driving():
        try:
            while request not in driver.advance(until_finished=False):
                if not driver.engine.has_unfinished():
                    raise RuntimeError("engine lost the request of a stream")
        except KeyboardInterrupt:
            driver.drop([request])
            raise interrupted(RequestOutputs([request.output()])) from None
