"""One-line descriptions of outputs and engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine.base import EngineBase
    from ..outputs import CompletionOutput, RequestOutput, ScoreOutput

LINE_CHARS = 120


def _line(kind: str, parts: Iterable[str], text: str) -> str:
    """`Kind(part, part, 'text ...')` within a line."""
    begin = f"{kind}({', '.join(parts)}, "
    shown = repr(text[:LINE_CHARS])
    room = LINE_CHARS - len(begin) - 1
    if len(shown) > room or len(text) > LINE_CHARS:
        shown = shown[: max(room - 5, 1)] + " ..." + shown[0]
    return f"{begin}{shown})"[:LINE_CHARS]


def completion_line(sample: CompletionOutput) -> str:
    """`CompletionOutput(0, 128 tokens, stop, 'The quick ...')`."""
    parts = [str(sample.index), f"{len(sample.token_ids_array)} tokens", sample.finish_reason or "running"]
    return _line("CompletionOutput", parts, sample.text)


def request_line(output: RequestOutput) -> str:
    """`RequestOutput(3, 128 tokens, stop, 'The quick ...')`."""
    count = sum(len(sample.token_ids_array) for sample in output.outputs)
    parts = [str(output.index), *_samples(output), f"{count} tokens", reason(output)]
    return _line("RequestOutput", parts, output.text or (str(output.error) if output.error else ""))


def score_line(output: ScoreOutput) -> str:
    """`ScoreOutput(0, 12 tokens from 1, sum -34.5, perplexity 17.8)`."""
    if output.error is not None:
        return _line("ScoreOutput", [str(output.index), "error"], str(output.error))
    return (
        f"ScoreOutput({output.index}, {len(output.token_logprobs)} tokens from {output.start}, "
        f"sum {output.sum_logprob:.4g}, perplexity {output.perplexity:.4g})"
    )


def _samples(output: RequestOutput) -> list[str]:
    return [f"{len(output.outputs)} samples"] if len(output.outputs) > 1 else []


def reason(output: RequestOutput) -> str:
    """The finish reason; names max_tokens if the output ended at its default value."""
    from ..sampling_params import has_default_length

    ended = output.finish_reason or "running"
    if ended == "length" and output.sampling_params is not None and has_default_length(output.sampling_params):
        return f"length, default max_tokens={output.sampling_params.max_tokens}"
    return ended


def size(count: int) -> str:
    """Bytes with a unit: 98.4 MB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count / scale < 100 else f"{count / scale:,.0f} {unit}"
    return f"{count} B"


def llm_line(llm: EngineBase) -> str:
    """`LLM(Qwen3-0.6B, bfloat16, cuda:0, weights 1.2 GB, cache 41,216 tokens, idle)`; the last words tell its state."""
    if llm.closed:
        return f"{type(llm).__name__}({llm.name}, closed)"
    stats, config, memory = llm.stats(), llm.config, llm.memory()
    if llm.num_cache_groups:
        room = f"{stats.kv_blocks_total // llm.num_cache_groups * config.block_size:,} tokens"
    else:
        room = f"{stats.kv_blocks_total // llm.num_state_blocks:,} states"
    busy = [f"{stats.num_running} running, {stats.num_waiting} waiting"] if stats.num_unfinished else []
    holds = [f"asleep at level {stats.sleep_level}" if one == "asleep" else one for one in stats.states if one != "serving"]
    state = ", ".join([*holds, *busy]) or "idle"
    kind, weights = type(llm).__name__, size(memory.get("weights", 0))
    device = f"{config.device} (host: {llm.on_host})" if llm.on_host else config.device
    replicas = f"{config.data_parallel_size} replicas, " if config.data_parallel_size > 1 else ""
    return f"{kind}({llm.name}, {llm.weight_type}, {device}, {replicas}weights {weights}, cache {room}, {state})"
