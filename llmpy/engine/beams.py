"""Requests and calls of beam search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..inputs import batch
from ..results.beam_search import BeamSampling, BeamSearchOutput, BeamSearchParams, BeamSearchSequence, sampling_of
from ..results.samples import NO_IDS
from .calls import run
from .frontend import one_each
from .requests import Request

if TYPE_CHECKING:
    from ..inputs import Prompts
    from ..outputs import RequestOutput
    from .calls import Submission
    from .driver import Driver
    from .progress import UseTqdm


class BeamRequest(Request):
    """A beam search. Its samples get their tokens when it ends, best first; a sample without tokens found no text."""

    params: BeamSampling

    def output(self, delta: bool = False) -> RequestOutput:
        """The output so far, without the samples that found no text, and with as many logprobs as wanted."""
        output = super().output(delta)
        empty = {index for index, one in enumerate(self.samples) if one.finish == "grammar" and not one.num_tokens}
        output.outputs = [one for one in output.outputs if one.index not in empty]
        most = self.params.shown_logprobs
        for one in output.outputs:
            one.logprobs = None if most is None or one.logprobs is None else one.logprobs.cut(most)
        return output

    def result(self) -> BeamSearchOutput:  # type: ignore[override]
        """The output that the call returns for this request."""
        output, penalty = super().output(), self.params.search.length_penalty
        prompt = output.prompt_token_ids_array.tolist()
        sequences = [
            BeamSearchSequence(
                tokens=prompt + one.token_ids,
                token_ids=one.token_ids,
                text=one.text,
                cum_logprob=one.cumulative_logprob or 0.0,
                score=(one.cumulative_logprob or 0.0) / len(one.token_ids) ** penalty,
                logprobs=one.logprobs,
                finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
                lora_request=output.lora_request,
            )
            for one in output.outputs
            if one.token_ids and one.finish_reason in ("stop", "length")
        ]
        return BeamSearchOutput(
            sequences=sequences,
            index=self.index,
            prompt=output.prompt,
            prompt_token_ids_array=NO_IDS if self.prompt.ids is None else self.prompt.ids,
            num_cached_tokens=self.num_cached_tokens,
            weight_version=output.weight_version,
            error=self.failure,
        )


class BeamCalls:
    """LLM's call of beam search."""

    if TYPE_CHECKING:
        _driver: Driver

        def _prepared(
            self,
            items: Sequence[object],
            sampling_params: Any,
            sampling: Any,
            lora_request: object,
            priority: int | Sequence[int],
            special_tokens: bool,
        ) -> list[Submission]: ...

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams | Sequence[BeamSearchParams],
        lora_request: object = None,
        use_tqdm: UseTqdm = None,
        concurrency_limit: int | None = None,
        *,
        on_error: str = "raise",
    ) -> list[BeamSearchOutput]:
        """Finds the most likely texts behind each prompt by beam search.

        In each step every live beam gives its 2 * beam_width most likely next tokens. Of all of them the 2 * beam_width best
        are looked at, by the sum of their logprobs. One that ends its text is found if it is among the best beam_width; the
        best beam_width others are the next beams. All beams of all prompts run in one batch, on shared cache blocks.

        Args:
            prompts: As in `generate`.
            params: One for all or one each.
            lora_request, use_tqdm, on_error: As in `generate`.
            concurrency_limit: Accepted without effect: the engine's `max_num_seqs` limits what runs at once.

        Returns:
            One BeamSearchOutput per prompt, in order.

        Raises:
            InvalidRequestError: A prompt or parameter cannot run; `.index` tells which. Nothing ran.
            RequestFailedError: A request failed while it ran; `.outputs` is the complete list.
            GenerationInterrupted: Ctrl-C; `.partial` holds the outputs so far.
            UnsupportedError: A prompt has `output_token_ids`, or there are stop strings and the tokens' texts, joined, are not
                the text.

        Example:
            >>> outputs = llm.beam_search(["The capital of France is"], BeamSearchParams(beam_width=4, max_tokens=16))
            >>> [(round(one.score, 2), one.text) for one in outputs[0].sequences]
        """
        items = batch(prompts)
        searches = one_each(params, len(items))
        sampling = {id(one): sampling_of(one) for one in searches}
        with self._driver.driving():
            wanted = [sampling[id(one)] for one in searches]
            submissions = self._prepared(items, wanted, {}, lora_request, 0, True)

            def collect() -> list[BeamSearchOutput]:
                return [request.result() for request, _ in submissions if isinstance(request, BeamRequest)]

            return run(self._driver, submissions, use_tqdm, on_error, collect)
