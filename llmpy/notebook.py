"""How outputs and engines look: one line for `repr`, HTML for notebooks. All text of models is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._engine_base import EngineBase
    from .outputs import CompletionOutput, RequestOutput, RequestOutputs, ScoreOutput

LINE_CHARS = 120
TABLE_ROWS = 50
CELL_CHARS = 300


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
    parts = [str(output.index), *_samples(output), f"{count} tokens", _reason(output)]
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


def _reason(output: RequestOutput) -> str:
    """The finish reason; says so when the length was nobody's choice."""
    from .sampling_params import has_default_length

    reason = output.finish_reason or "running"
    if reason == "length" and output.sampling_params is not None and has_default_length(output.sampling_params):
        return f"length, default max_tokens={output.sampling_params.max_tokens}"
    return reason


def _tint(logprob: float) -> str:
    """A background from clear (certain) to red (unlikely)."""
    doubt = min(max(-logprob, 0.0) / 6, 1.0) if not math.isnan(logprob) else 0.0
    return f"background:rgba(220,60,40,{doubt * 0.55:.2f})"


def _spans(sample: CompletionOutput) -> str:
    """The sample's tokens, tinted by logprob, with id, logprob and rank as tooltip; or its text."""
    shown: list[str] = []
    for row in sample.logprobs or ():
        token, entry = next(iter((row or {}).items()))
        if entry.decoded_token is None:
            shown = []
            break
        title = f"id {token}, logprob {entry.logprob:.3f}, rank {entry.rank}"
        style = _tint(entry.logprob)
        shown.append(f'<span style="{style}" title="{title}">{html.escape(entry.decoded_token)}</span>')
    return "".join(shown) or html.escape(sample.text)


def _pre(content: str) -> str:
    return f'<pre style="white-space:pre-wrap;margin:2px 0;text-align:left">{content}</pre>'


def completion_html(sample: CompletionOutput) -> str:
    """One sample with its text."""
    note = f"sample {sample.index}, {len(sample.token_ids_array)} tokens, {sample.finish_reason or 'running'}"
    return f"<div><small>{html.escape(note)}</small>{_pre(_spans(sample))}</div>"


def request_html(output: RequestOutput) -> str:
    """A request with its prompt, its samples, finish reason and speed."""
    count = sum(len(sample.token_ids_array) for sample in output.outputs)
    notes = [f"request {output.index}", f"{len(output.prompt_token_ids_array)} prompt tokens", f"{count} tokens"]
    notes.append(_reason(output))
    time = output.metrics.time_per_output_token if output.metrics else None
    if time:
        notes.append(f"{1 / time:.1f} tokens/s")
    prompt = f'<div style="opacity:.6">{_pre(html.escape(output.prompt))}</div>' if output.prompt else ""
    error = f"<div><b>{html.escape(str(output.error))}</b></div>" if output.error else ""
    samples = "".join(map(_pre, map(_spans, output.outputs)))
    return f"<div><small>{html.escape(', '.join(notes))}</small>{prompt}{error}{samples}</div>"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of escaped cells."""
    style = "text-align:left;vertical-align:top;white-space:pre-wrap"
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f'<td style="{style}">{html.escape(str(cell))}</td>' for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def table_html(outputs: RequestOutputs) -> str:
    """A table of at most 50 samples."""
    samples = [(output, sample) for output in outputs for sample in output.outputs]
    rows = [
        (
            output.index,
            _clip(output.prompt if output.prompt is not None else f"{len(output.prompt_token_ids_array)} ids"),
            _clip(sample.text if output.error is None else str(output.error)),
            len(sample.token_ids_array),
            sample.finish_reason or "running",
        )
        for output, sample in samples[:TABLE_ROWS]
    ]
    more = f"<small>{len(samples) - TABLE_ROWS} more</small>" if len(samples) > TABLE_ROWS else ""
    speed = f", {outputs.num_generation_tokens / outputs.elapsed:.1f} tokens/s" if outputs.elapsed else ""
    note = f"<small>{len(outputs)} requests, {outputs.num_generation_tokens} tokens{speed}</small>"
    return f"<div>{_table(['', 'prompt', 'text', 'tokens', 'finish'], rows)}{more}<br>{note}</div>"


def _clip(text: str) -> str:
    return text if len(text) <= CELL_CHARS else text[:CELL_CHARS] + " ..."


def size(count: int) -> str:
    """Bytes for people: 98.4 MB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count / scale < 100 else f"{count / scale:,.0f} {unit}"
    return f"{count} B"


def llm_line(llm: EngineBase) -> str:
    """`LLM(Qwen3-0.6B, bfloat16, cuda:0, weights 1.2 GB, cache 41,216 tokens, idle)`."""
    if llm.closed:
        return f"{type(llm).__name__}({llm.name}, closed)"
    stats, config, memory = llm.stats(), llm.config, llm.memory()
    if llm.num_cache_groups:
        room = f"{stats.kv_blocks_total // llm.num_cache_groups * config.block_size:,} tokens"
    else:
        room = f"{stats.kv_blocks_total // llm.num_state_blocks:,} states"
    state = f"{stats.num_running} running, {stats.num_waiting} waiting" if stats.num_unfinished else "idle"
    kind, weights = type(llm).__name__, size(memory.get("weights", 0))
    return f"{kind}({llm.name}, {llm.weight_type}, {config.device}, weights {weights}, cache {room}, {state})"


def llm_html(llm: EngineBase) -> str:
    """The engine's memory and statistics."""
    if llm.closed:
        return f"<code>{html.escape(llm_line(llm))}</code>"
    memory = _table(["memory", ""], [(name, size(count)) for name, count in llm.memory().items()])
    stats = _table(["statistics", ""], llm.stats().to_dict().items())
    return f'<code>{html.escape(llm_line(llm))}</code><div style="display:flex;gap:2em">{memory}{stats}</div>'
