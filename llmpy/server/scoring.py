"""/score and /rerank: similarity of texts by a cross-encoder or by the cosine of embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.types import ASGIApp

from ..engine.frontend import check_text
from ..inputs import TokensPrompt
from .errors import HttpError, answer
from .frames import attended
from .limits import most
from .pooling import check_task, made, pooled
from .protocol import Pooling, RerankRequest, ScoreRequest
from .requests import read
from .service import Service

Pairs = list[tuple[str, str]]


async def scores(service: Service, request: Request, body: Pooling, pairs: Pairs) -> tuple[list[float], dict[str, Any]]:
    """Computes the scores of pairs of texts, and the usage."""
    if len(pairs) > most("prompts"):
        raise HttpError(400, f"wanted at most {most('prompts')} texts, have {len(pairs)}", "documents")
    pooler = service.engine._frontend.pooler
    if "classify" in pooler.tasks:
        if len(pooler.labels) != 1:
            message = f"{request.url.path} wants a classifier with one label, or embeddings; this one has {len(pooler.labels)}"
            raise HttpError(400, message, "model")
        size = sum(len(first) + len(second) for first, second in pairs)
        joined = service.beside(size, lambda: [_joined(service, first, second) for first, second in pairs])
        prompts = await attended(request.receive, joined)
        rows, usage = await pooled(service, request, body, prompts, "classify", use_activation=body.use_activation)
        return [float(row[0]) for row in rows], usage
    task = check_task(service, request, ("embed",))
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    rows, usage = await pooled(service, request, body, texts, task, normalize=True)
    place = {text: i for i, text in enumerate(texts)}
    return [float(np.dot(rows[place[first]], rows[place[second]])) for first, second in pairs], usage


def _joined(service: Service, first: str, second: str) -> TokensPrompt:
    """A pair as one prompt of a cross-encoder."""
    for text in (first, second):
        check_text(service.tokenizer, text, service.max_model_len)
    ids, types = service.tokenizer.encode_pair(first, second)
    typed = service.engine._frontend.pooler.has_token_types
    return {"prompt_token_ids": ids, "token_type_ids": types} if typed else {"prompt_token_ids": ids}


def _texts(given: str | list[str] | None, name: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given or []
    if not texts:
        raise HttpError(400, f"wanted {name}, have none", name)
    return texts


async def score(service: Service, request: Request) -> ASGIApp:
    """Scores one text against several, or pairs."""
    body = await read(request, ScoreRequest)
    name = service.model_name(body.model)
    first = _texts(body.text_1 if body.queries is None else body.queries, "text_1")
    second = _texts(body.text_2 if body.documents is None else body.documents, "text_2")
    if len(first) not in (1, len(second)):
        raise HttpError(400, f"text_1: wanted one text or as many as text_2 ({len(second)}), have {len(first)}", "text_1")
    pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
    values, usage = await scores(service, request, body, pairs)
    data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(values)]
    return answer(made("score", name, {"data": data, "usage": usage}), headers=service.answer_headers(request))


def _document(given: str | dict[str, Any], index: int) -> str:
    text = given if isinstance(given, str) else given.get("text")
    if not isinstance(text, str):
        raise HttpError(400, f"documents[{index}]: wanted text, or an object with text", "documents")
    return text


async def rerank(service: Service, request: Request) -> ASGIApp:
    """Sorts documents by their score for a query, the best first."""
    body = await read(request, RerankRequest)
    name = service.model_name(body.model)
    texts = [_document(document, i) for i, document in enumerate(body.documents)]
    if body.top_n is not None and body.top_n < 0:
        raise HttpError(400, f"top_n: wanted 0 or more, have {body.top_n}", "top_n")
    values, usage = await scores(service, request, body, [(body.query, text) for text in texts])
    order = sorted(range(len(texts)), key=lambda i: (-values[i], i))[: body.top_n or None]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": values[i]} for i in order]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    return answer(made("rerank", name, {"results": results, "usage": usage}), headers=service.answer_headers(request))


POST = {
    "/score": score,
    "/v1/score": score,
    "/rerank": rerank,
    "/v1/rerank": rerank,
    "/v2/rerank": rerank,
}
