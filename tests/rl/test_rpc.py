"""Calls over a socket: many at once, errors, and closed connections."""

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from llmpy.rl._rpc import Client, Server


class Methods:
    """The served methods."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.gate = asyncio.Event()

    async def add(self, a: int, b: int = 1) -> int:
        return a + b

    async def wait(self) -> str:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return "opened"

    async def fail(self) -> None:
        raise ValueError("no such thing")


async def serve() -> tuple[Methods, Server, Client]:
    methods = Methods()
    server = Server({name: getattr(methods, name) for name in ("add", "wait", "fail")})
    await server.start()
    return methods, server, Client(server.path)


def test_many_at_once() -> None:
    async def main() -> None:
        methods, server, client = await serve()
        waiting = asyncio.create_task(client.call("wait"))
        assert await asyncio.gather(*[client.call("add", i, b=2) for i in range(50)]) == [i + 2 for i in range(50)]
        assert not waiting.done()
        methods.gate.set()
        assert await waiting == "opened"
        assert await client.call("add", 1) == 2
        await client.close()
        await server.close()
        assert not Path(server.path).parent.exists()

    asyncio.run(main())


def test_errors_come_back() -> None:
    async def main() -> None:
        _, server, client = await serve()
        for name, text in (("fail", "ValueError: no such thing"), ("__class__", "KeyError")):
            with pytest.raises(RuntimeError, match=text):
                await client.call(name)
        await client.close()
        await server.close()

    asyncio.run(main())


def test_a_caller_that_leaves_cancels_its_calls() -> None:
    async def main() -> None:
        methods, server, client = await serve()
        waiting = asyncio.create_task(client.call("wait"))
        assert await client.call("add", 1) == 2
        await client.close()
        with pytest.raises(ConnectionError):
            await waiting
        while not methods.cancelled:
            await asyncio.sleep(0.01)
        again = Client(server.path)
        assert await again.call("add", 1) == 2
        lost = asyncio.create_task(again.call("wait"))
        await again.call("add", 1)
        await server.close()
        with pytest.raises((ConnectionError, RuntimeError)):
            await asyncio.wait_for(lost, 60)

    asyncio.run(main())


def test_only_this_user_may_call() -> None:
    async def main() -> None:
        _, server, client = await serve()
        assert stat.S_IMODE(Path(server.path).parent.stat().st_mode) == 0o700
        await client.close()
        await server.close()

    asyncio.run(main())


def test_a_line_is_json() -> None:
    """The socket transfers JSON, which cannot run code."""

    async def main() -> None:
        _, server, client = await serve()
        reader, writer = await asyncio.open_unix_connection(server.path)
        message: dict[str, Any] = {"id": 7, "call": "add", "args": [1], "kwargs": {"b": 5}}
        writer.write(json.dumps(message).encode() + b"\n")
        assert json.loads(await reader.readline()) == {"id": 7, "result": 6}
        writer.close()
        await client.close()
        await server.close()

    asyncio.run(main())
