"""Outputs and engines as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from .charts import shares_svg
from .lines import llm_line, reason, score_line, size
from .tokens import tokens_html

if TYPE_CHECKING:
    from ..engine.base import EngineBase
    from ..outputs import CompletionOutput, EngineStats, RequestOutput, RequestOutputs, ScoreOutput

TABLE_ROWS = 50
CELL_CHARS = 300
PURPOSES = {"kv": "cache", "pinned_host": "pinned host"}


def _pre(content: str) -> str:
    style = "white-space:pre-wrap;margin:2px 0;text-align:left;font-variant-ligatures:none"
    return f'<pre style="{style}">{content}</pre>'


def completion_html(sample: CompletionOutput) -> str:
    """One sample with its text."""
    note = f"sample {sample.index}, {len(sample.token_ids_array)} tokens, {sample.finish_reason or 'running'}"
    return f"<div><small>{escape(note)}</small>{_pre(tokens_html(sample.logprobs, sample.text))}</div>"


def request_html(output: RequestOutput) -> str:
    """A request with its prompt, its samples, finish reason and speed."""
    count = sum(len(sample.token_ids_array) for sample in output.outputs)
    notes = [f"request {output.index}", f"{len(output.prompt_token_ids_array)} prompt tokens", f"{count} tokens"]
    notes.append(reason(output))
    time = output.metrics.time_per_output_token if output.metrics else None
    if time:
        notes.append(f"{1 / time:.1f} tokens/s")
    prompt = f'<div style="opacity:.6">{_pre(escape(output.prompt))}</div>' if output.prompt else ""
    error = f"<div><b>{escape(str(output.error))}</b></div>" if output.error else ""
    samples = "".join(_pre(tokens_html(sample.logprobs, sample.text)) for sample in output.outputs)
    return f"<div><small>{escape(', '.join(notes))}</small>{prompt}{error}{samples}</div>"


def score_html(output: ScoreOutput) -> str:
    """A scored sequence: text before the scored tokens is dimmed, scored tokens are tinted."""
    note = f"<small>{escape(score_line(output))}</small>"
    rows = output._logprobs
    if rows is None:
        return f"<div>{note}</div>"
    before = "".join(rows.text(token) or "" for token in output.token_ids[: output.start])
    return f"<div>{note}{_pre(tokens_html(rows, '', before))}</div>"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of escaped cells."""
    style = "text-align:left;vertical-align:top;white-space:pre-wrap"
    top = "".join(f'<th style="text-align:left">{escape(cell)}</th>' for cell in head)
    body = "".join("<tr>" + "".join(f'<td style="{style}">{escape(str(cell))}</td>' for cell in row) + "</tr>" for row in rows)
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


def llm_html(llm: EngineBase) -> str:
    """The engine's memory and cache as charts, its work in one line, and all numbers in a folded section."""
    line = f"<small><code>{escape(llm_line(llm))}</code></small>"
    if llm.closed:
        return line
    memory, stats = llm.memory(), llm.stats()
    own = {PURPOSES.get(name, name): (float(n), size(n)) for name, n in memory.items() if n and not name.startswith("device_")}
    room = f"{size(memory['device_free'])} of {size(memory['device_total'])} free on {llm.config.device}"
    numbers = [*memory.items(), *stats.to_dict().items()]
    return (
        f"<div>{line}<br>{shares_svg(f'Memory, {room}', own)}<br>{_cache_svg(llm, stats)}"
        f"<div><small>{escape(_done(stats))}</small></div>"
        f"<details><summary><small>all numbers</small></summary>{_table(['', ''], numbers)}</details></div>"
    )


def _cache_svg(llm: EngineBase, stats: EngineStats) -> str:
    """A bar of the cache's blocks: in use by samples, cached for later prompts, and free."""
    last = llm.step_log(1)
    used = stats.kv_blocks_total - stats.kv_blocks_free
    cached = min(last[-1].blocks_cached if last else 0, stats.kv_blocks_free)
    parts = {"in use": used, "kept for later prompts": cached, "free": stats.kv_blocks_free - cached}
    return shares_svg(
        f"Cache, {stats.kv_blocks_total:,} blocks", {name: (float(blocks), f"{blocks:,}") for name, blocks in parts.items()}
    )


def _done(stats: EngineStats) -> str:
    """A line with the engine's work so far."""
    found = f", {stats.prefix_cache_hits:,} found in the cache" if stats.prefix_cache_queries else ""
    busy = f"{stats.num_running} running, {stats.num_waiting} waiting; "
    return f"{busy}{stats.prompt_tokens:,} prompt tokens{found}; {stats.generation_tokens:,} tokens written"
