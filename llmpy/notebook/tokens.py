"""The token view: each token is tinted by its logprob; a card below shows its alternatives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..logprobs import Entry, Logprob

CARD_ROWS = 10
STYLE = """<style>
.llmpy-tokens{position:relative;padding-bottom:5.6em}
.llmpy-token{border-radius:3px;outline-offset:-1px}
.llmpy-token:hover,.llmpy-token:focus{outline:1px solid #2f8f87}
.llmpy-token:hover>.llmpy-card,.llmpy-token:focus>.llmpy-card{display:block;position:absolute;left:0;bottom:0}
.llmpy-card,.llmpy-hint{max-width:calc(100% - 20px);padding:5px 10px;border-radius:8px;background:rgba(128,128,128,.13);
font-size:12px;line-height:1.5;white-space:pre-wrap}
.llmpy-hint{position:absolute;left:0;bottom:0;opacity:.6}
.llmpy-tokens:has(.llmpy-token:hover,.llmpy-token:focus)>.llmpy-hint{display:none}
.llmpy-card b{color:#2f8f87}
</style>"""
"""Cards are below the text, so that the output area does not cut them off. The tab key and touch reach tokens. Without styles,
cards stay hidden."""
HINT = '<span class="llmpy-hint">Point at a token.</span>'


def tint(logprob: float) -> str:
    """A background colour from clear (certain) to red (unlikely)."""
    doubt = min(max(-logprob, 0.0) / 6, 1.0) if not math.isnan(logprob) else 0.0
    return f"background:rgba(220,60,40,{doubt * 0.55:.2f})"


def tokens_html(rows: Iterable[Entry | None] | None, text: str, before: str = "") -> str:
    """The HTML of tokens, each with its card.

    Args:
        rows: Logprobs of the tokens, or None.
        text: Text to show if there are no logprobs or no token texts.
        before: Text to show dimmed before the tokens.
    """
    shown: list[str] = []
    for row in rows or ():
        token, entry = next(iter((row or {}).items()))
        if entry.decoded_token is None:
            return escape(text)
        card = f'<span class="llmpy-card" hidden>{_card(row or {}, token)}</span>'
        style = tint(entry.logprob)
        shown.append(f'<span class="llmpy-token" tabindex="0" style="{style}">{card}{escape(entry.decoded_token)}</span>')
    dim = f'<span style="opacity:.6">{escape(before)}</span>' if before else ""
    return f'{STYLE}<div class="llmpy-tokens">{dim}{"".join(shown)}{HINT}</div>' if shown else escape(text)


def _card(row: Mapping[int, Logprob], token: int) -> str:
    """Id, logprob and rank of a token, and the most likely tokens with their probabilities."""
    own = row[token]
    best = sorted(row.items(), key=lambda item: -item[1].logprob)[:CARD_ROWS] if len(row) > 1 else []
    shares = []
    for other, entry in best:
        share = escape(f"{100 * math.exp(entry.logprob):.2f} % {entry.decoded_token!r}")
        shares.append(f"<b>{share}</b>" if other == token else share)
    return f"id {token}, logprob {own.logprob:.3f}, rank {own.rank}\n{'   '.join(shares)}"
