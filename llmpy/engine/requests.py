"""Running requests: collects the core's updates and makes outputs of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidRequestError, LlmpyError, NoAllowedTokenError, NonFiniteLogitsError, RequestFailedError
from ..outputs import RequestMetrics, RequestOutput, SampleMetrics, ScoreOutput, add_places, used_places
from ..results.samples import NO_FLOATS, NO_IDS, Sample, prompt_view, top_arrays, view

if TYPE_CHECKING:
    from .._core import CoreOutput
    from ..inputs import Prompt
    from ..pooling_outputs import PoolingRequestOutput
    from ..sampling_params import SamplingParams
    from .context import Context


class Request:
    """A request.

    Args:
        request_id, index: As in RequestOutput.
        prompt: The prompt with its ids.
        params: The sampling parameters used.
        mode: The logprobs mode.
        seed: The seed used.
        context: Shared by the engine's requests.
        queued: Whether `step` returns its outputs.
    """

    match_stops = False
    """True if stop strings are searched here, because the core does not know the bytes of the tokens."""

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        mode: str,
        seed: int,
        context: Context,
        queued: bool = False,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.prompt = prompt
        self.params = params
        self.mode = mode
        self.seed = seed
        self.context = context
        self.queued = queued
        self.number = -1
        self.arrival_time = time.time()
        self.samples = [Sample() for _ in range(params.n)]
        self.error: LlmpyError | None = None
        self.finished = False
        self.num_cached_tokens = self.num_cached_images = 0
        self._num_preemptions = 0
        self._drafts: tuple[int, ...] = ()
        self._accepted_drafts: tuple[int, ...] = ()
        self._has_text = False
        self._epoch = 0
        self._times = (0.0, 0.0, 0.0, 0.0)
        self._prompt_logprobs: tuple[bytes, ...] | None = None
        self._prompt_top: tuple[bytes, ...] | None = None

    def prepare_text(self) -> None:
        """Creates the text makers. If stop strings are searched here, call it before the request is submitted."""
        self._has_text = True
        for sample in self.samples:
            if sample.text is None:
                sample.text = self.context.make_text(self.prompt, self.params)

    def absorb(self, output: CoreOutput) -> None:
        """Adds an update from the core."""
        self.num_cached_tokens, self.num_cached_images = output["num_cached_tokens"], output["num_cached_images"]
        self._num_preemptions = output["num_preemptions"]
        self._epoch = output["epoch"]
        self._times = output["times"]
        if output["prompt_logprobs"] is not None:
            self._prompt_logprobs, self._prompt_top = output["prompt_logprobs"], output["prompt_top"]
        if output["drafts"] is not None:
            drafts, accepted = used_places(*(memoryview(counts).cast("I").tolist() for counts in output["drafts"]))
            self._drafts = add_places(self._drafts, drafts)
            self._accepted_drafts = add_places(self._accepted_drafts, accepted)
            self.samples[output["sample"]].metrics = SampleMetrics(drafts, accepted)
        if output["finish"] == "error" and self.error is None:
            self.error = failure(output, self.params, self.prompt)
        self._absorb_sample(self.samples[output["sample"]], output)
        if output["is_last"]:
            self.finished = True

    def absorb_more(self, columns: tuple[bytes, ...], last_token: float, preemptions: int, epoch: int) -> None:
        """Adds tokens to the only sample; the update holds nothing but tokens."""
        sample = self.samples[0]
        if epoch != sample.epoch:
            sample.mark(epoch)
        sample.pieces.append(columns)
        sample.num_tokens += len(columns[0]) >> 2
        self._num_preemptions = preemptions
        self._epoch = epoch
        times = self._times
        self._times = (times[0], times[1], times[2], last_token)

    @property
    def streams_plainly(self) -> bool:
        """Whether every delta before the end holds only tokens of one sample."""
        params = self.params
        return params.n == 1 and params.prompt_logprobs is None and not self.match_stops

    def plain_delta(self, columns: tuple[bytes, ...], last_token: float, preemptions: int, epoch: int) -> RequestOutput:
        """`absorb_more` and `output(delta=True)` in one, for a request that streams plainly and has no unshown output."""
        prompt, params, context = self.prompt, self.params, self.context
        sample = self.samples[0]
        completion = sample.plain_delta(columns, epoch, params, self.mode, context)
        if prompt.prior is not None:
            completion.num_prior_tokens = len(prompt.prior)
        self._num_preemptions = preemptions
        self._epoch = epoch
        queued, scheduled, first, _ = self._times
        self._times = (queued, scheduled, first, last_token)
        return RequestOutput(
            request_id=self.request_id,
            index=self.index,
            prompt=prompt.text,
            prompt_token_ids_array=NO_IDS if prompt.ids is None else prompt.ids,
            outputs=[completion],
            num_cached_tokens=self.num_cached_tokens,
            num_image_tokens=prompt.num_image_tokens,
            num_cached_images=self.num_cached_images,
            weight_version=completion.weight_versions[0].version,
            seed=self.seed,
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                queued_ts=queued,
                scheduled_ts=scheduled,
                first_token_ts=first,
                last_token_ts=last_token,
                num_preemptions=preemptions,
                num_generation_tokens=sample.num_tokens,
            ),
            sampling_params=params,
            lora_request=None if prompt.adapter is None else prompt.adapter.request,
        )

    def _absorb_sample(self, sample: Sample, output: CoreOutput) -> None:
        sample.add(output, self.params)
        if self.match_stops:
            sample.match_stops(self.params)
            self.finished = self.finished or all(item.finish is not None for item in self.samples)

    @property
    def version(self) -> int | str:
        """Label of the weights that made the last token."""
        return self.context.version(self._epoch)

    def output(self, delta: bool = False) -> RequestOutput:
        """The output so far; with `delta` only the part since the last delta."""
        if not self._has_text:
            self.prepare_text()
        prompt, params, version = self.prompt, self.params, self.version
        prior = 0 if prompt.prior is None else len(prompt.prior)
        outputs = []
        for index, sample in enumerate(self.samples):
            if delta and not sample.has_output:
                continue
            start = sample.shown_tokens if delta else 0
            completion = sample.output(index, params, self.mode, self.context, delta)
            completion.num_prior_tokens = prior
            if sample.num_tokens > start:
                completion.weight_versions = sample.spans(start, self.context)
            if prompt.reader is not None and prompt.ids is not None and not delta:
                completion._reply = prompt.reader.of(completion, prompt.text, prompt.ids, params)
            outputs.append(completion)
        ids = NO_IDS if prompt.ids is None else prompt.ids
        output = RequestOutput(
            request_id=self.request_id,
            index=self.index,
            prompt=prompt.text,
            prompt_token_ids_array=ids,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            num_image_tokens=prompt.num_image_tokens,
            num_cached_images=self.num_cached_images,
            weight_version=version,
            seed=self.seed,
            metrics=self._metrics(),
            error=self.error,
            sampling_params=params,
            lora_request=None if prompt.adapter is None else prompt.adapter.request,
        )
        if params.prompt_logprobs is not None:
            lone = (b"", b"") if len(ids) == 1 and self.error is None else None
            logprobs = self._prompt_logprobs or lone
            if logprobs is not None and len(logprobs[0]) == 4 * (len(ids) - 1):  # else it ended during its prompt
                output.prompt_logprobs, output.prompt_token_logprobs = prompt_view(
                    ids, logprobs, self._prompt_top, self.context, params.detokenize
                )
        return output

    def result(self) -> RequestOutput | ScoreOutput | PoolingRequestOutput[Any]:
        """The output that the call returns for this request."""
        return self.output()

    def _metrics(self) -> RequestMetrics:
        queued, scheduled, first, last = self._times
        return RequestMetrics(
            arrival_time=self.arrival_time,
            queued_ts=queued or None,
            scheduled_ts=scheduled or None,
            first_token_ts=first or None,
            last_token_ts=last or None,
            num_preemptions=self._num_preemptions,
            num_generation_tokens=sum([sample.num_tokens for sample in self.samples]),
            drafts=self._drafts,
            accepted_drafts=self._accepted_drafts,
        )

    def fail(self, error: LlmpyError) -> None:
        """Ends the request with an error before it runs."""
        self.error = error
        self.finished = True
        for sample in self.samples:
            sample.finish = "error"

    @property
    def failure(self) -> LlmpyError | None:
        """The error if the request has no complete result; for requests with a single result."""
        if self.error is None and any(sample.finish == "abort" for sample in self.samples):
            return RequestFailedError("request was aborted before it finished")
        return self.error

    def abort(self) -> None:
        """Ends unfinished samples with the finish reason "abort"."""
        self.finished = True
        for sample in self.samples:
            sample.finish = sample.finish or "abort"


class ScoreRequest(Request):
    """A request that scores the tokens of its prompt from `start` on."""

    start = 1

    def _absorb_sample(self, sample: Sample, output: CoreOutput) -> None:
        sample.finish = output["finish"]

    def result(self) -> ScoreOutput:
        """The output that the call returns for this request."""
        return self.score()

    def score(self) -> ScoreOutput:
        """The output."""
        ids = NO_IDS if self.prompt.ids is None else self.prompt.ids
        values, ranks, rows = NO_FLOATS, NO_IDS, None
        if self._prompt_logprobs is not None:
            values = np.frombuffer(self._prompt_logprobs[0], np.float32)
            ranks = np.frombuffer(self._prompt_logprobs[1], np.int32)
            best = top_arrays(self._prompt_top, len(values))
            rows = view(ids[self.start :], values, ranks, best, self.context, True)
        return ScoreOutput(
            index=self.index,
            token_ids_array=ids,
            start=self.start,
            token_logprobs=values,
            ranks=ranks,
            top=rows if self.params.logprobs else None,
            num_cached_tokens=self.num_cached_tokens,
            weight_version=self.version,
            error=self.failure,
            _logprobs=rows,
        )


def failure(output: CoreOutput, params: SamplingParams, prompt: Prompt) -> LlmpyError:
    """The exception for a failed sample's status."""
    if "fault" in output:
        return output["fault"]
    position = output["error_position"]
    if output["error"] is not None:
        given = None if params.constraint is None else params.constraint.to_dict()
        return InvalidRequestError(f"structured_outputs: {output['error']}", parameter="structured_outputs", value=given)
    if output["status"] == 1:
        message = f"logits at position {position}: wanted finite numbers, have NaN or +inf; try dtype='float32'"
        if prompt.images:
            places = ", ".join(f"{one.first} to {one.first + one.n_tokens - 1}" for one in prompt.images)
            message += f" (features of images at positions {places} may be the cause)"
        return NonFiniteLogitsError(message, position=position)
    candidates = ("structured_outputs", "allowed_token_ids", "logit_bias", "bad_words", "bad_token_ids", "min_tokens")
    names = [name for name in candidates if getattr(params, name)] or ["vocab_limit", "banned_token_ids"]
    return NoAllowedTokenError(
        f"no token is allowed at position {position}: {', '.join(names)} leave none; relax one of them",
        position=position,
        fields=tuple(names),
    )
