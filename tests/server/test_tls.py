"""TLS: `llmpy serve` with a certificate, and clients with trusted authorities."""

import asyncio
import contextlib
import datetime
import ipaddress
import os
import socket
import ssl
import subprocess
import sys
import time
from argparse import Namespace
from types import SimpleNamespace

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from llmpy.cli import main
from llmpy.cli.tls import tls_context
from llmpy.server import build_app, connections
from llmpy.server.connections import bounded
from llmpy.server.handshakes import Handshake

PASSWORD = "of the key"


def certificate(name, issuer=None):
    """Makes a certificate for 127.0.0.1 and its key, signed by an issuer or by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    return builder.sign(issuer[1] if issuer else key, hashes.SHA256()), key


def write_key(path, key, encryption):
    kinds = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(*kinds, encryption))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Certificates of a server (self-signed) and of a client (signed by the server)."""
    folder = tmp_path_factory.mktemp("tls")
    server = certificate("server")
    client = certificate("client", server)
    for name, (made, key) in (("server", server), ("client", client)):
        (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
        write_key(folder / f"{name}.key", key, serialization.NoEncryption())
    write_key(folder / "locked.key", server[1], serialization.BestAvailableEncryption(PASSWORD.encode()))
    (folder / "password").write_text(PASSWORD + "\n")
    return SimpleNamespace(
        server=folder / "server.pem",
        server_key=folder / "server.key",
        locked_key=folder / "locked.key",
        password=folder / "password",
        client=(str(folder / "client.pem"), str(folder / "client.key")),
    )


@pytest.fixture
def address(engine, files):
    """The address of `llmpy serve` with the certificate."""
    words = ["--device", "cpu", "--port", "0", "--kv-cache-memory-bytes", "4MiB", "--served-model-name", "tiny"]
    words += ["--ssl-certfile", str(files.server), "--ssl-keyfile", str(files.server_key)]
    command = [sys.executable, "-m", "llmpy", "serve", *words, "--", str(engine.config.model)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            told = next(line for line in iter(process.stderr.readline, "") if line.startswith("http"))
            yield told.strip().removesuffix("/v1")
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and errors.endswith("ending: what runs has 30 s; another signal ends it now\n"), errors


def test_serve_speaks_tls_alone(address, files):
    assert address.startswith("https://127.0.0.1:")
    trusted = ssl.create_default_context(cafile=files.server)
    with httpx.Client(base_url=address, verify=trusted, timeout=60) as client:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
        made = client.post("/v1/completions", json=body).json()
        assert made["usage"]["completion_tokens"] == 4
        for _ in range(20):  # the first words of a client may come before the server reads
            assert httpx.get(f"{address}/health", verify=trusted, timeout=60).status_code == 200
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            assert response.read().endswith(b"data: [DONE]\n\n")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{address}/health")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{address.replace('https', 'http')}/health")
    words = [sys.executable, "-m", "llmpy", "complete", "--url", address, "-p", "hello", "--max-tokens", "4"]
    done = subprocess.run(words, env={**os.environ, "SSL_CERT_FILE": str(files.server)}, capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def secured(most=8, **given):
    """uvicorn's option for a server with these files."""
    names = ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password_file", "ssl_ca_certs")
    return {"http": bounded(most, 5.0, tls_context(Namespace(**{name: given.get(name) for name in names})))}


def test_clients_need_a_certificate_where_authorities_are_named(engine, running, files):
    locked = {"ssl_keyfile": files.locked_key, "ssl_keyfile_password_file": files.password}
    config = secured(ssl_certfile=files.server, ssl_ca_certs=files.server, **locked)
    port = running(build_app(engine), **config).port
    url = f"https://127.0.0.1:{port}/health"
    trusted = ssl.create_default_context(cafile=files.server)
    with pytest.raises(httpx.TransportError):
        httpx.get(url, verify=trusted)
    trusted.load_cert_chain(*files.client)
    assert httpx.get(url, verify=trusted).status_code == 200


@pytest.fixture
def half_open(engine, running, files, monkeypatch):
    """The port of a server for four connections, and a function that opens connections without a handshake."""
    monkeypatch.setattr(connections, "HEAD_S", 1.0)
    port = running(build_app(engine), **secured(4, ssl_certfile=files.server, ssl_keyfile=files.server_key)).port
    with contextlib.ExitStack() as stack:

        def begin(count):
            return [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(count)]

        yield port, begin


def test_half_open_handshakes_are_counted_and_have_a_deadline(half_open, files):
    port, begin = half_open
    trusted = ssl.create_default_context(cafile=files.server)
    first = begin(4)
    (surplus,) = begin(1)
    with contextlib.suppress(ConnectionResetError):
        assert surplus.recv(1) == b""
    begun = time.monotonic()
    for one in first:
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b""
    assert time.monotonic() - begun < 20
    assert httpx.get(f"https://127.0.0.1:{port}/health", verify=trusted, timeout=60).status_code == 200


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
@pytest.mark.parametrize("place", ["start_tls", "_hand_over"])
def test_an_error_in_a_handshake(half_open, files, monkeypatch, place, error):
    """After an error in a handshake, the connection is closed and no longer counted; later ones are served."""
    port, _ = half_open
    owner = {"start_tls": asyncio.BaseEventLoop, "_hand_over": Handshake}[place]
    real, left = getattr(owner, place), [5]

    def fail(*given, **named):
        if left[0]:
            left[0] -= 1
            raise error("told")
        return real(*given, **named)

    monkeypatch.setattr(owner, place, fail)
    trusted = ssl.create_default_context(cafile=files.server)
    for _ in range(5):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"https://127.0.0.1:{port}/health", verify=trusted, timeout=30)
    for _ in range(3):
        assert httpx.get(f"https://127.0.0.1:{port}/health", verify=trusted, timeout=60).status_code == 200


def test_a_handshake_that_is_none_ends_its_connection(half_open):
    _, begin = half_open
    (one,) = begin(1)
    one.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while part := one.recv(4096):
            answer += part
    assert b"HTTP" not in answer


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--ssl-keyfile", "server_key"], "--ssl-certfile: wanted the server's certificate, have none"),
        (["--ssl-certfile", "nowhere.pem"], "No such file or directory: 'nowhere.pem'"),
        (["--ssl-certfile", "server"], "wanted a PEM certificate and its key (--ssl-keyfile)"),
        (["--ssl-certfile", "password"], "wanted a PEM certificate"),
        (["--ssl-certfile", "server", "--ssl-keyfile", "locked_key"], "--ssl-keyfile-password-file if the key has a password"),
        (["--ssl-certfile", "server", "--ssl-keyfile", "server_key", "--ssl-ca-certs", "password"], "wanted PEM certificates"),
    ],
)
def test_wrong_files_are_named_before_the_model_is_loaded(files, capsys, given, message):
    words = [str(getattr(files, word, word)) for word in given]
    assert main(["serve", "no/model", *words]) == 1
    told = capsys.readouterr().err
    assert message in told and "no/model" not in told
