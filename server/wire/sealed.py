"""Reasoning as a text that a client keeps for the server and hands back as it is. It is no secret: anyone can read it."""

from __future__ import annotations

import base64
from binascii import Error

from ..errors import RequestError

MARK = "slotcache:"
ENCODING = "utf-8", "surrogatepass"


def seal(reasoning: str) -> str:
    """Return the text to keep."""
    return MARK + base64.b64encode(reasoning.encode(*ENCODING)).decode()


def unseal(sealed: str, where: str) -> str:
    """Return the reasoning; empty for a text of another server, which nobody here can read. Raises RequestError."""
    if not sealed.startswith(MARK):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(MARK), validate=True).decode(*ENCODING)
    except (Error, ValueError):
        raise RequestError(f"{where} is damaged: send it as it came", param=where) from None
