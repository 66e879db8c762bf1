"""The sockets of `llmpy serve`. They are bound before the model loads, so that a port in use fails at once."""

from __future__ import annotations

import contextlib
import socket

from ..errors import ConfigError


def bind(host: str, port: int) -> list[socket.socket]:
    """Binds a socket for every address of a host.

    Args:
        host: A name or an address.
        port: Port of all sockets; 0 = any free port.

        Raises:
            ConfigError: The host is not this machine, or the port is in use.
    """
    if not 0 <= port < 65536:
        raise ConfigError(f"--port: wanted 0 to 65535, have {port}", option="port", value=port)
    with contextlib.ExitStack() as stack:
        try:
            found = {(entry[0], entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
            sockets: list[socket.socket] = []
            for family, address in sorted(found):
                made = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                made.bind((address, port))
                port = made.getsockname()[1]
                sockets.append(made)
        except OSError as error:
            message = f"--host {host} --port {port}: {error.strerror or error}"
            raise ConfigError(message, option="port", value=port) from None
        stack.pop_all()
    return sockets
