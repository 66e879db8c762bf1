"""Images of requests: data: URLs always, http(s) URLs and files only where an option allows them.

A URL's name is resolved once. Every address of it must be public, and the connection goes to one of these addresses, so that no
answer of a name server can lead to this network. There are no redirects, no credentials and no proxies.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

import h11

from ..async_engine import AsyncEngine
from ..engine.frontend import too_long
from ..inputs import ImageInputs, Prompt, parse_ids
from ..text.chat_images import KINDS, has_images, refuse_images, take_images
from .errors import HttpError
from .limits import MIB, most, seconds

if TYPE_CHECKING:
    from ..vision.images import Images
    from ..vision.items import PlacedItem
    from .protocol import Features
    from .service import Service

PORTS = {"http": 80, "https": 443}
AT_ONCE = 4
"""Images of one request that are fetched at the same time."""
MAX_URL = 2048
CHUNK = 64 << 10

Messages = list[dict[str, Any]]
Source = bytes | str | Path
"""Bytes of a file, a data: URL, or the path of a file, which is read within its folder later."""


async def load_images(service: Service, messages: Messages) -> tuple[Messages, list[Source]]:
    """Takes the images out of messages.

    Args:
        service: The server.
        messages: The messages of a request.

    Returns:
        The messages, in which an image is its number in the list; and the list of the images.

    Raises:
        UnsupportedError: The model takes no images.
        HttpError: 400, an image cannot be had, or there are too many.
    """
    if not has_images(messages):
        return messages, []
    known = images_of(service)
    if known is None:
        refuse_images(messages)
    taken = take_images(messages).images
    assert taken is not None and known is not None
    if len(taken.data) > known.most:
        message = f"{len(taken.data)} images in one request, but --limit-mm-per-prompt allows {known.most}"
        raise HttpError(400, message, "messages")
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(source: object) -> Source:
        async with slots:
            return await load(service, source)

    tasks = [asyncio.ensure_future(one(source)) for source in taken.data]
    try:
        sources = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    numbers = iter(range(len(sources)))
    return [_numbered(message, numbers) for message in messages], list(sources)


def _numbered(message: dict[str, Any], numbers: Any) -> dict[str, Any]:
    """A message whose images are numbers."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        {"type": "image", "image": next(numbers), "uuid": part.get("uuid")} if _is_image(part) else part for part in content
    ]
    return {**message, "content": parts}


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in KINDS


def details(messages: Messages) -> list[str]:
    """Names of fields of images that are passed over, for the answer's header."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            place = part.get("image_url") if _is_image(part) else None
            if any(isinstance(one, dict) and one.get("detail") is not None for one in (part, place)):
                return ["image_url.detail"]
    return []


def inserted(images: ImageInputs | None, sources: Sequence[Source]) -> ImageInputs | None:
    """The images of a rendered conversation, from their numbers."""
    if images is None:
        return None
    numbers = images.data
    if not all(isinstance(number, int) and not isinstance(number, bool) and number < len(sources) for number in numbers):
        raise HttpError(400, "images are not supported on this path", "messages")
    return images._replace(data=tuple(sources[number] for number in numbers if isinstance(number, int)))


def images_of(service: Service) -> Images | None:
    """What prepares images; None: the model takes none."""
    engine = service.engine
    found: Images | None = engine._frontend.images if isinstance(engine, AsyncEngine) else getattr(engine, "images", None)
    return found


def placeholder_of(service: Service) -> str | None:
    """What stands for an image in a text; None: the server takes no images."""
    known = images_of(service)
    return None if known is None else known.writer.placeholder


def expanded(service: Service, prompt: Prompt) -> tuple[list[int], Sequence[PlacedItem]]:
    """Token ids of a rendered conversation, and its images at their places."""
    known = images_of(service)
    if prompt.media is None or known is None:
        return service.encode(str(prompt.text)), ()
    known.add(prompt)
    ids = service.encode(prompt.expanded or prompt.text or "")
    if len(ids) > service.max_model_len:
        raise too_long(f"length {len(ids)}", len(ids), service.max_model_len)
    prompt.ids = parse_ids(ids)
    known.place(prompt)
    return ids, prompt.images


def given_images(messages: Messages) -> ImageInputs | None:
    """The images of messages as the request gave them."""
    return take_images(messages).images if has_images(messages) else None


def features_of(placed: Sequence[PlacedItem], given: ImageInputs | None) -> dict[str, Any] | None:
    """The field `features` of a rendered body: the images as they were given, their places, and keys of their contents."""
    if given is None:
        return None
    return {
        "image_urls": list(given.data),
        "image_uuids": list(given.uuids),
        "mm_hashes": {"image": [one.item.content.hex() for one in placed]},
        "mm_placeholders": {"image": [{"offset": one.first, "length": one.n_tokens} for one in placed]},
    }


async def featured(service: Service, features: Features) -> dict[str, Any]:
    """The images of a body with `features`, as fields of a prompt.

    Raises:
        HttpError: 400, an image cannot be had, or there are none.
    """
    if not features.image_urls:
        raise HttpError(400, "features: wanted image_urls, the URLs of the images; features alone are not taken", "features")
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in features.image_urls]
    _, sources = await load_images(service, [{"role": "user", "content": parts}])
    names = features.image_uuids or [None] * len(sources)
    return {"multi_modal_data": {"image": sources}, "multi_modal_uuids": {"image": names}}


def check_contents(prompt: Prompt, features: Features) -> None:
    """Refuses images that are not those of the keys in `features`."""
    wanted = features.mm_hashes.get("image")
    have = [item.content.hex() for item in prompt.items]
    if wanted is not None and wanted != have:
        raise HttpError(400, f"features.mm_hashes: wanted the images {wanted}, have {have}".replace("'", ""), "features")


async def load(service: Service, source: object) -> Source:
    """An image behind a URL, if an option allows that URL."""
    if not isinstance(source, str):
        raise HttpError(400, "image_url: wanted a URL", "messages")
    scheme = source[:8].partition(":")[0].lower()
    if source.startswith("data:"):
        return source
    if scheme == "file" and service.engine.config.allowed_image_folder is not None:
        return Path(source[len("file://") :])
    if scheme in PORTS and service.options.allow_image_urls:
        return await fetch(source, service.options.image_domains)
    advice = {"http": "--allow-image-urls", "https": "--allow-image-urls", "file": "--allowed-image-folder"}.get(scheme)
    known = f"; the server's option {advice} would allow it" if advice else ""
    raise HttpError(400, f"image_url: wanted a data: URL, have one of {scheme[:8]!r}{known}", "messages")


# ---- fetching ------------------------------------------------------------------------------------------------------------


async def fetch(url: str, domains: Sequence[str] = ()) -> bytes:
    """Fetches an image.

    Args:
        url: An http or https URL.
        domains: Names that may be asked, with all below them; () = every name.

    Raises:
        HttpError: 400. What the network said of an address is not told.
    """
    parts = _parsed(url, domains)
    try:
        async with asyncio.timeout(seconds("image_s")):
            return await _fetched(parts)
    except (OSError, TimeoutError, ssl.SSLError, h11.ProtocolError, UnicodeError):
        raise _refused() from None


def _refused() -> HttpError:
    return HttpError(400, "image_url: the image cannot be fetched", "messages")


def _parsed(url: str, domains: Sequence[str]) -> SplitResult:
    """The parts of a URL that may be fetched."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise HttpError(400, "image_url: not a URL", "messages") from None
    host = (parts.hostname or "").rstrip(".")
    problem = None
    if len(url) > MAX_URL or not url.isascii() or any(character <= " " or character == "\x7f" for character in url):
        problem = f"wanted at most {MAX_URL} printable ASCII characters"
    elif parts.username is not None or parts.password is not None:
        problem = "a URL with a name or a password is not allowed"
    elif not host:
        problem = "the URL has no host"
    elif port not in (None, PORTS[parts.scheme]):
        problem = f"wanted port {PORTS[parts.scheme]}"
    elif domains and not any(host == name.lower() or host.endswith("." + name.lower()) for name in domains):
        problem = "the host is not among --image-domains"
    if problem:
        raise HttpError(400, f"image_url: {problem}", "messages")
    return parts


async def _fetched(parts: SplitResult) -> bytes:
    host, port = str(parts.hostname), PORTS[parts.scheme]
    async with asyncio.timeout(seconds("image_connect_s")):
        address = await resolve(host, port)
        tls = {"ssl": tls_context(), "server_hostname": host} if parts.scheme == "https" else {}
        reader, writer = await asyncio.open_connection(address, port, limit=CHUNK, **tls)  # type: ignore[arg-type]
    try:
        return await _exchange(parts, reader, writer)
    finally:
        writer.close()


async def resolve(host: str, port: int) -> str:
    """The first address of a name, all of whose addresses are public.

    Raises:
        OSError: There is no address, or one of them is not public.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses or not all(map(is_public, addresses)):
        raise OSError("not a public address")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet and embeds no other address."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # with a scope
        return False
    if not ip.is_global or ip.is_multicast or ip.is_reserved:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        return not (ip.ipv4_mapped or ip.sixtofour or ip.teredo or ip.is_site_local)
    return ip not in ipaddress.IPv4Network("192.88.99.0/24")  # relays of 6to4


@lru_cache(maxsize=1)
def tls_context() -> ssl.SSLContext:
    """Checks certificates and names by the system's authorities."""
    return ssl.create_default_context()


async def _exchange(parts: SplitResult, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Sends the request and reads the answer."""
    connection = h11.Connection(h11.CLIENT)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    host = parts.netloc.rpartition("@")[2]
    headers = [("Host", host), ("User-Agent", "llmpy"), ("Accept", "image/*"), ("Connection", "close")]
    for event in (h11.Request(method="GET", target=target, headers=headers), h11.EndOfMessage()):
        writer.write(connection.send(event) or b"")
    await writer.drain()
    body, limit = bytearray(), most("image_bytes")
    while True:
        told: Any = connection.next_event()
        if told is h11.NEED_DATA:
            connection.receive_data(await reader.read(CHUNK))
        elif isinstance(told, h11.Response):
            _check_head(told, limit)
        elif isinstance(told, h11.Data):
            body += told.data
            if len(body) > limit:
                raise _too_long(limit)
        elif isinstance(told, h11.EndOfMessage):
            return bytes(body)
        elif isinstance(told, h11.ConnectionClosed):
            raise _refused()


def _check_head(head: h11.Response, limit: int) -> None:
    """Refuses what is no image, a redirect or an error."""
    fields = {name.lower(): value for name, value in head.headers}
    kind = fields.get(b"content-type", b"").lower()
    if head.status_code != 200 or fields.get(b"content-encoding", b"identity").lower() != b"identity":
        raise _refused()
    if not kind.startswith(b"image/"):
        raise HttpError(400, "image_url: wanted an answer of type image/*", "messages")
    length = fields.get(b"content-length", b"0")
    if length.isdigit() and int(length) > limit:
        raise _too_long(limit)


def _too_long(limit: int) -> HttpError:
    return HttpError(400, f"image_url: the image has more than {limit // MIB} MiB", "messages")
