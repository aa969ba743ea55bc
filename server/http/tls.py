"""TLS between a socket and the HTTP parser (`--ssl-key-file`, `--ssl-cert-file`).

`Connection` uses this filter between its socket and its parser. So the limits of `Connection` hold for TLS, too, and a
handshake counts as part of a request's head. asyncio's own TLS has other limits, keeps 256 KiB for each connection, and
notices late that a client has stopped reading.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..config.settings import Settings, SettingsError


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """Return the TLS context of the server's connections, or None for plain HTTP. Raises SettingsError."""
    files = {"--ssl-key-file": settings.ssl_key_file, "--ssl-cert-file": settings.ssl_cert_file}
    if not any(files.values()):
        return None
    for flag, path in files.items():
        if not path:
            raise SettingsError(f"{flag} is missing: TLS needs the key and its certificate")
        try:
            Path(path).expanduser().open("rb").close()
        except OSError as error:
            raise SettingsError(f"{flag} {path}: {error.strerror}: expected a PEM file") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    key, certificate = (Path(path).expanduser() for path in files.values())
    try:
        context.load_cert_chain(certificate, key, password="")  # without `password`, OpenSSL would ask on the terminal
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise SettingsError(
            f"--ssl-key-file {settings.ssl_key_file} and --ssl-cert-file {settings.ssl_cert_file}: {reason}: "
            "expected PEM files that belong together, the key without a password"
        ) from None
    return context


class TlsFilter:
    """The server's side of TLS for one connection."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.context = context
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._has_met = False  # whether the handshake is done

    def received(self, data: bytes, most: int) -> Iterator[bytes]:
        """Decrypt bytes from the socket, and yield the result in pieces of at most `most` bytes.

        An empty piece means that the client will send no more bytes. Raises ssl.SSLError if the client does not speak TLS,
        or only versions that the server does not accept.
        """
        self._incoming.write(data)
        with suppress(ssl.SSLWantReadError):
            if not self._has_met:
                self._object.do_handshake()
                self._has_met = True
            while piece := self._object.read(most):
                yield piece
            yield b""

    def sealed(self, data: bytes | bytearray) -> bytes:
        """Return the bytes to send: TLS's own messages and the encrypted `data`. If TLS has failed, `data` is left out."""
        view = memoryview(data)
        with suppress(ssl.SSLError):
            while view:
                view = view[self._object.write(view) :]
        return self._outgoing.read()

    def end(self) -> bytes:
        """Return TLS's closing message for the socket."""
        with suppress(ssl.SSLError):
            self._object.unwrap()
        return self._outgoing.read()
