"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ..engine.feeds import RequestStream
from ..engine.jobs import as_exception, is_cancellation
from ..inputs import parse
from ..outputs import CompletionOutput, RequestOutput
from ..sampling_params import RequestOutputKind
from .errors import HttpError, answer, to_http
from .frames import DONE, EventStream, attended
from .logprobs import LogprobWriter, prompt_logprobs
from .protocol import CompletionRequest
from .requests import beside, prompts_of, read, sampling
from .service import UNTOLD, Answering, Service, raise_failure, usage_of, with_ids

DEFAULT_MAX_TOKENS = 16

encode = msgspec.json.encode


class Completion(Answering):
    """One completion request in progress.

    Args:
        service: The server.
        request: The HTTP request.
        body: The body of the request.
    """

    def __init__(self, service: Service, request: Request, body: CompletionRequest) -> None:
        super().__init__(service, request, body, "cmpl", body.logprobs)
        self.body = body
        self.prompts = prompts_of(body.prompt, "prompt", service.sizes)
        self.n = body.n or 1
        if body.best_of not in (None, self.n):
            raise HttpError(400, f"best_of: wanted n ({self.n}), have {body.best_of}", "best_of")
        fields = sampling(body, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
        fields["logprobs"] = body.logprobs
        self.echoes = bool(body.echo) and body.logprobs is not None
        if self.echoes and not body.stream:
            fields.setdefault("prompt_logprobs", body.logprobs)
        self.scores_only = bool(body.echo) and body.max_tokens == 0
        if self.scores_only:
            fields["max_tokens"] = 1
        self.fields = {**fields, "output_kind": self.kind}

    async def submit(self) -> list[RequestStream]:
        """Queues all prompts, or none if one is refused."""
        if self.body.add_special_tokens is False:
            self.prompts = await self.service.encoded(self.prompts)
        return await self.service.beside(self.size, self._queue)

    def _queue(self) -> list[RequestStream]:
        streams: list[RequestStream] = []
        try:
            for index, given in enumerate(self.prompts):
                prompt = parse(given)
                prompt.room = None if not self.body.max_tokens else ("max_tokens", self.body.max_tokens)
                how = {**self.how, "request_id": self.how["request_id"] + (f"-{index}" if len(self.prompts) > 1 else "")}
                streams.append(self.service.run(prompt, True, how, self.params(self.fields)))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams

    def prompt_text(self, output: RequestOutput) -> str:
        """The prompt's text for `echo`."""
        return output.prompt if output.prompt is not None else self.service.tokenizer.decode(output.prompt_token_ids)

    def echoed_logprobs(self, output: RequestOutput, writer: LogprobWriter) -> dict[str, Any]:
        """The logprobs of the prompt for `echo`."""
        assert output.prompt_logprobs is not None
        lists = writer.completion(output.prompt_logprobs[:0])
        writer.first(lists, output.prompt_token_ids[0])
        return joined([lists, writer.completion(output.prompt_logprobs[1:])])

    async def prompt_outputs(self) -> list[RequestOutput]:
        """Runs the prompts alone to get their logprobs, because a stream has them only at its end. The prompts stay cached."""
        asks: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": self.body.logprobs}
        asks["output_kind"] = RequestOutputKind.FINAL_ONLY
        generate = self.service.engine.generate
        streams = [generate(prompt, cache_salt=self.how["cache_salt"], **asks) for prompt in self.prompts]
        return [await stream for stream in streams]

    # ---- not streamed -----------------------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        """Runs the request and returns the answer."""
        streams = await self.submit()
        try:
            outputs = [await stream for stream in streams]
        finally:
            for stream in streams:
                stream.close()
        choices = await self.service.write(
            outputs,
            lambda: [
                self.choice(place * self.n + sample.index, output, sample)
                for place, output in enumerate(outputs)
                for sample in output.outputs
            ],
        )
        tokens = 0 if self.scores_only else sum(len(s.token_ids_array) for output in outputs for s in output.outputs)
        handed = await self.handed(outputs)
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage_of(outputs, tokens),
            **handed,
            **UNTOLD,
        }

    def choice(self, index: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """One sample of the answer."""
        body, text, lists = self.body, sample.text, None
        writer = self.writer()
        if body.echo:
            text = self.prompt_text(output) + ("" if self.scores_only else text)
        if body.logprobs is not None:
            parts = [self.echoed_logprobs(output, writer)] if body.echo else []
            if not self.scores_only:
                assert sample.logprobs is not None
                parts.append(writer.completion(sample.logprobs))
            lists = joined(parts)
        choice = {
            "index": index,
            "text": text,
            "logprobs": lists,
            "finish_reason": "length" if self.scores_only else sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
            with_ids(choice, sample)
        return choice

    # ---- streamed ---------------------------------------------------------------------------------------------------

    async def frames(self, streams: list[RequestStream]) -> AsyncGenerator[bytes]:
        """The frames of a streamed answer."""
        made = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        head = encode({**made, **UNTOLD})[:-1]
        options = self.body.stream_options
        plain = b',"usage":null' if options and options.include_usage else b""
        running = bool(options and options.continuous_usage_stats)
        lasts: dict[int, RequestOutput] = {}
        writers: dict[int, LogprobWriter] = {}
        tokens, end, left = 0, b"", len(streams)
        try:
            prompts = await self.prompt_outputs() if self.echoes else []
            async for place, output in merged(streams):
                raise_failure(output)
                begun, lasts[place] = place in lasts, output
                tokens += 0 if self.scores_only else sum(len(sample.token_ids_array) for sample in output.outputs)
                usage = b',"usage":' + encode(usage_of([output], tokens)) if running else plain
                prompt = prompts[place] if prompts else output
                written = [output] if begun or prompt is output else [output, prompt]
                choices = await self.service.write(written, partial(self.deltas, place, output, writers, not begun, prompt))
                frame = b"".join(b"data: " + head + b',"choices":[' + choice + b"]" + usage + b"}\n\n" for choice in choices)
                left -= output.finished
                if left:
                    yield frame
                else:
                    end = frame
            if self.service.options.role == "prefill":
                await self.handed(list(lasts.values()))
            if options and options.include_usage:
                end += b"data: " + head + b',"choices":[],"usage":' + encode(usage_of(list(lasts.values()), tokens)) + b"}\n\n"
        except Exception as error:
            end += b"data: " + encode(to_http(error).body()) + b"\n\n"
        finally:
            for stream in streams:
                stream.close()
        yield end + DONE

    def deltas(
        self,
        place: int,
        output: RequestOutput,
        writers: dict[int, LogprobWriter],
        is_first: bool,
        prompt: RequestOutput,
    ) -> list[bytes]:
        """The deltas of all samples of a prompt. Args as in `delta`; `writers` maps a sample's number to its writer."""
        made = []
        for sample in output.outputs:
            number = place * self.n + sample.index
            if number not in writers:
                writers[number] = self.writer()
            made.append(self.delta(number, output, sample, writers[number], is_first, prompt))
        return made

    def delta(
        self,
        number: int,
        output: RequestOutput,
        sample: CompletionOutput,
        writer: LogprobWriter,
        is_first: bool,
        prompt: RequestOutput,
    ) -> bytes:
        """The delta of a sample; `prompt` has the prompt's logprobs if they were requested."""
        body, text, lists = self.body, "" if self.scores_only else sample.text, None
        if body.logprobs is not None and sample.logprobs is not None and not self.scores_only:
            lists = writer.completion(sample.logprobs)
        if body.echo and is_first:
            text = self.prompt_text(output) + text
            if self.echoes:
                writer.offset = 0
                own = [] if lists is None or sample.logprobs is None else [sample.logprobs]
                lists = joined([self.echoed_logprobs(prompt, writer), *map(writer.completion, own)])
        reason = "length" if self.scores_only and sample.finish_reason else sample.finish_reason
        choice: dict[str, Any] = {"index": number, "text": text, "logprobs": lists, "finish_reason": reason}
        if sample.stop_reason is not None:
            choice["stop_reason"] = sample.stop_reason
        if body.return_token_ids:
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
            with_ids(choice, sample)
        return encode(choice)


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Concatenates lists of logprobs."""
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


async def merged(streams: list[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of all streams as they arrive, with the index of the stream."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=len(streams))

    async def pump(place: int) -> None:
        try:
            async for output in streams[place]:
                await queue.put((place, output))
            await queue.put((place, None))
        except BaseException as error:
            if is_cancellation(error):
                raise
            await queue.put((place, as_exception(error)))

    tasks = [asyncio.create_task(pump(place)) for place in range(len(streams))]
    try:
        left = len(tasks)
        while left:
            place, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            left -= item is None
            if item is not None:
                yield place, item
    finally:
        for task in tasks:
            task.cancel()


async def completions(service: Service, request: Request) -> ASGIApp:
    """Answers a completion request."""
    body = await read(request, CompletionRequest)
    completion = await beside(request, lambda: Completion(service, request, body))
    headers = service.answer_headers(request)
    if body.stream:
        frames = completion.frames(await attended(request.receive, completion.submit()))
        return EventStream(frames, headers, service.options.stream_timeout)
    return answer(await attended(request.receive, completion.whole()), headers=headers)
