"""The page at `/`: a chat, probabilities of its tokens, and plots of the engine; plain files without a build step."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""The policy allows no other origins, no inline script or style, and no framing of the page."""


def routes() -> list[Route]:
    """Routes of the page and of its files below /page/."""
    return [_route(file.name) for file in files(__name__).iterdir() if _kind(file.name) in TYPES]


def is_page(path: str) -> bool:
    """Whether a path is the page or one of its files. They are served without a key; the page asks the user for the key."""
    return path == "/" or path.startswith("/page/")


def _route(name: str) -> Route:
    content = files(__name__).joinpath(name).read_bytes()
    media_type = TYPES[_kind(name)]

    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return Route("/" if name == "index.html" else f"/page/{name}", answer, methods=["GET"])


def _kind(name: str) -> str:
    return name.rpartition(".")[2]
