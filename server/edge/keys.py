"""The API keys of a server: those on its command line, and those in a file."""

from __future__ import annotations

import secrets
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers

from ..flags.setting import SettingsError, listed
from ..settings import Settings


class Keys:
    """Compares in a time that shows neither a key nor which of them it was. Without keys any request is admitted."""

    def __init__(self, keys: frozenset[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @classmethod
    def of(cls, settings: Settings) -> Keys:
        """Return the keys of --api-key and --api-key-file. Raises SettingsError for a file without any."""
        given = listed(settings.api_key)
        return cls(given | _keys_in(settings.api_key_file) if settings.api_key_file else given)

    def admit(self, headers: Headers) -> bool:
        """Return whether a request carries one of the keys."""
        return not self._digests or any([self._has(key) for key in _presented(headers)])

    def _has(self, key: bytes) -> bool:
        presented = _digest(key)
        return any([secrets.compare_digest(presented, digest) for digest in self._digests])  # a list: all are compared


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


def _presented(headers: Headers) -> list[bytes]:
    """Return the keys that a request carries: OpenAI's, llama-server's bare one, and Anthropic's."""
    authorization = headers.get("authorization", "").strip()
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() == "bearer":
        authorization = key.strip()
    return [key.encode("latin-1") for key in (authorization, headers.get("x-api-key", "").strip()) if key]


def _keys_in(path: str) -> frozenset[str]:
    """Return the keys in a file, one a line; a line that begins with # is a comment."""
    try:
        lines = [line.strip() for line in Path(path).expanduser().read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--api-key-file {path} cannot be read: {error}") from None
    if not (keys := frozenset(line for line in lines if line and not line.startswith("#"))):
        raise SettingsError(f"--api-key-file {path} holds no key: expected one a line")
    return keys
