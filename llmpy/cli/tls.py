"""TLS of `llmpy serve`; the files are checked before a model is loaded."""

from __future__ import annotations

import ssl
from argparse import Namespace
from pathlib import Path

from ..errors import ConfigError


def tls_context(chosen: Namespace) -> ssl.SSLContext | None:
    """The TLS context with certificate, key and trusted authorities; None without --ssl-certfile.

    Raises:
        ConfigError: The files do not match, or have another format.
        OSError: A file cannot be read.
    """
    certificate: Path | None = chosen.ssl_certfile
    key, password_file, authorities = chosen.ssl_keyfile, chosen.ssl_keyfile_password_file, chosen.ssl_ca_certs
    if certificate is None:
        if key or password_file or authorities:
            raise ConfigError("--ssl-certfile: wanted the server's certificate, have none", option="ssl_certfile")
        return None
    for path in (certificate, key, authorities):
        if path is not None:
            path.open("rb").close()  # the ssl module's error does not name a missing file
    password = password_file.read_text().rstrip("\r\n") if password_file else None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password or "")  # without a password OpenSSL would prompt on the terminal
    except (ssl.SSLError, ValueError) as error:
        message = f"--ssl-certfile {certificate}: wanted a PEM certificate and its key (--ssl-keyfile), have {_reason(error)}"
        hint = "; --ssl-keyfile-password-file if the key has a password" if password is None else ""
        raise ConfigError(message + hint, option="ssl_certfile", value=str(certificate)) from None
    if authorities is not None:
        try:
            context.load_verify_locations(authorities)
        except ssl.SSLError as error:
            message = f"--ssl-ca-certs {authorities}: wanted PEM certificates, have {_reason(error)}"
            raise ConfigError(message, option="ssl_ca_certs", value=str(authorities)) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _reason(error: Exception) -> str:
    return (getattr(error, "reason", None) or str(error)).lower().replace("_", " ")
