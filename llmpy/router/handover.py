"""Prefill on one engine, decode on another: the request that the first one gets, in vLLM's protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .policy import Prompt

PREFILLED = "kv_transfer_params"
ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
ASK |= {"remote_host": None, "remote_port": None}
TAKING = ("/v1/completions", "/v1/chat/completions")
"""Paths that have the field."""
LEFT_OUT = ("stream_options", "min_tokens", "n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "echo")
"""Fields that matter to the second half alone."""


def prefill_body(path: str, fields: Mapping[str, Any] | None, prompt: Prompt) -> tuple[str, bytes] | None:
    """Path and body of the first half.

    Args:
        path: The request's path.
        fields: Its body.
        prompt: Its prompt; if the path does not have the field, its ids are computed as a completion.

    Returns:
        None: the decode engine computes the prompt by itself.
    """
    if fields is None or fields.get(PREFILLED) is not None or fields.get("use_beam_search"):
        return None
    if path not in TAKING:
        if prompt.per_token != 1 or not prompt.ids:
            return None
        own = {name: fields[name] for name in ("cache_salt", "model") if fields.get(name) is not None}
        made: dict[str, Any] = {"prompt": list(prompt.ids), "max_tokens": 1, PREFILLED: ASK, **own}
        return TAKING[0], msgspec.json.encode(made)
    made = {name: value for name, value in fields.items() if name not in LEFT_OUT}
    if "max_completion_tokens" in made:
        made["max_completion_tokens"] = 1
    return path, msgspec.json.encode({**made, "max_tokens": 1, "stream": False, PREFILLED: ASK})
