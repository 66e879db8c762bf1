"""/score and /rerank: similarity of texts by a cross-encoder or by the cosine of embeddings."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from ..engine.similarity import cosine, is_cross_encoder, joined
from ..errors import UnsupportedError
from .errors import HttpError, answer
from .frames import attended
from .limits import most
from .pooling import made, pooled
from .protocol import Pooling, RerankRequest, ScoreRequest
from .requests import read
from .service import Service

Pairs = list[tuple[str, str]]


async def scores(service: Service, request: Request, body: Pooling, pairs: Pairs) -> tuple[list[float], dict[str, Any]]:
    """Computes the scores of pairs of texts, and the usage."""
    if len(pairs) > most("prompts"):
        raise HttpError(400, f"wanted at most {most('prompts')} texts, have {len(pairs)}", "documents")
    frontend = service.engine._frontend
    try:
        scores_pairs = is_cross_encoder(frontend.pooler, request.url.path)
    except UnsupportedError as error:
        raise HttpError(400, str(error), "model") from None
    if scores_pairs:
        size = sum(len(first) + len(second) for first, second in pairs)
        work = service.beside(size, lambda: [joined(frontend, first, second) for first, second in pairs])
        prompts = await attended(request.receive, work)
        rows, usage = await pooled(service, request, body, prompts, "classify", use_activation=body.use_activation)
        return [float(row[0]) for row in rows], usage
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    rows, usage = await pooled(service, request, body, texts, "embed", normalize=True)
    place = {text: i for i, text in enumerate(texts)}
    return [cosine(rows[place[first]], rows[place[second]]) for first, second in pairs], usage


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
