"""vLLM's `kv_transfer_params`: a prompt that one server computes, and another server goes on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..engine.handover import ALONE, Apart, check
from ..engine.outer_tier import is_device
from ..errors import ConfigError, UnsupportedError
from .errors import HttpError

if TYPE_CHECKING:
    from ..async_engine import AsyncEngine
    from ..outputs import RequestOutput

FIELD = "kv_transfer_params"
PATIENCE_S = 10.0
"""Seconds without a new block of a prompt that another server still computes, behind which the rest is computed."""


def is_prefill(engine: AsyncEngine, params: object, stream: bool, role: str = "both") -> bool:
    """Whether another server goes on with the request.

    Raises:
        HttpError: The field has another form, the answer is streamed, which has no place for the result, the engine has no
            store, or the server has the role "decode".
    """
    if params is None:
        return False
    if not isinstance(params, Mapping) or type(params.get("do_remote_decode", False)) is not bool:
        raise HttpError(400, f"{FIELD} must be an object whose do_remote_decode is true or false", FIELD)
    if not params.get("do_remote_decode"):
        return False
    if role == "decode":
        raise HttpError(400, f"{FIELD}: this server has the role decode; do_remote_decode is for the role prefill", FIELD)
    if stream:
        raise HttpError(400, f"{FIELD} with do_remote_decode needs stream=false", FIELD)
    try:
        check(engine.config, FIELD)
    except (ConfigError, UnsupportedError) as error:
        raise HttpError(501, str(error), FIELD) from error
    return True


async def hand_over(engine: AsyncEngine, outputs: Sequence[RequestOutput], cache_salt: str | None) -> dict[str, Any]:
    """Saves prompts where the other server finds them.

    Args:
        engine: The engine that has computed them.
        outputs: One for each prompt.
        cache_salt: As in `AsyncEngine.generate`.

    Returns:
        The field of the answer, which a proxy puts into the request for the other server.
    """
    size, blocks = engine.config.block_size or 1, 0
    for output in outputs:
        blocks += await engine.save_prompt(output.prompt_token_ids, cache_salt) // size
    told = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": list(range(blocks))}
    return {FIELD: {**told, "remote_engine_id": engine._engine_id or engine.name, "remote_host": None, "remote_port": None}}


def part_of(engine: AsyncEngine, params: object, saves: bool) -> Apart:
    """What other servers have to do with a request.

    Args:
        engine: This server's engine.
        params: The field of the request.
        saves: Whether the prompt is computed for another server.

    Raises:
        HttpError: 501, the prompt is still computed, and its blocks come through no store.
    """
    given = params if isinstance(params, Mapping) and params.get("do_remote_prefill") else {}
    is_whole = given.get("is_whole", True) is not False
    if is_device(engine.config) and not is_whole:
        raise HttpError(501, f"{FIELD}: is_whole=false is not supported with kv_connector={{'name': 'device'}}", FIELD)
    if is_device(engine.config):
        return Apart(str(given.get("remote_engine_id") or "")) if given else ALONE
    return Apart(saves_early=saves, awaits_s=0.0 if is_whole else PATIENCE_S)


def check_role(role: str, max_tokens: int | None) -> None:
    """Raises for a request that wants more than the prompt from a server of the role "prefill".

    Raises:
        HttpError: 400, `max_tokens` is not 1.
    """
    if role == "prefill" and max_tokens != 1:
        message = "this server has the role prefill: wanted max_tokens 1; ask a server of the role decode, or `llmpy route`"
        raise HttpError(400, message, "max_tokens")
