"""The settings of the front: the server's and its own. Flags and the environment follow the server's rules."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import urlsplit

from ..ordering.policy import BestPlace, Order
from ..server.config.flags import add_settings
from ..server.config.settings import SETTINGS, Settings, SettingsError, row, table_of

PORT = 8090  # differs from the server's usual port, so that both can run on one machine
ACCESS = ("host", "ssl_key_file", "ssl_cert_file", "api_key", "api_key_file", "allowed_hosts", "cors_origins", "max_body")
SHARED = (*ACCESS, "log_format", "log_file")
"""The server's settings that a front has too, for its own port."""

Dialect = Literal["auto", "llama", "vllm", "sglang", "slotcache", "openai"]
Switch = Literal["auto", "off"]
Dedup = Literal["auto", "in_place", "off"]


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """The settings that only a front has. Some settings are the defaults of a request's fields. Times are in seconds."""

    upstream: str = row("", ("--upstream",), "address of the engine or of its router, such as http://127.0.0.1:8080")
    upstream_key: str = row("", ("--upstream-key",), "the API key that the upstream wants, instead of the client's")
    port: int = row(PORT, ("--port",), "port to listen on", most=65535)
    dialect: Dialect = row("auto", ("--dialect",), "how the upstream reports cached tokens; auto: `GET /v1/models` names it")
    tree_nodes: int = row(10_000, ("--tree-nodes",), "documents that the upstream is taken to have in its cache", least=1)
    affinity_header: str = row("x-session-id", ("--affinity-header",), "header by which a router knows which requests belong together; empty: none")
    document_order: Order = row("auto", ("--document-order",), "default `document_order`")
    best: BestPlace = row("free", ("--best",), "default `best`: place of the document of rank 1; first and last cost reuse")
    dedup: Dedup = row("auto", ("--dedup",), "default `dedup`: earlier documents are referred to; in_place: at their ranks")
    tool_documents: Switch = row("auto", ("--tool-documents",), "default `tool_documents`: lists in results count")
    order_hint: bool = row(True, ("--order-hint",), "default `order_hint`: state the ranking after documents")
    max_relayed: int = row(256, ("--max-relayed",), "most requests that are relayed at a time; one more is answered 503", least=1)
    connect_timeout: float = row(5.0, ("--connect-timeout",), "most time to connect to the upstream", least=0)
    answer_timeout: float = row(600.0, ("--answer-timeout",), "most time until an answer begins", least=0)
    stall_timeout: float = row(120.0, ("--stall-timeout",), "most time between two pieces of an answer", least=0)
    # fmt: on

    def __post_init__(self) -> None:
        if self.upstream and not _is_address(self.upstream):
            raise SettingsError(f"--upstream {self.upstream}: expected an address such as http://127.0.0.1:8080")

    @property
    def base(self) -> str:
        """The upstream's address, before a path such as /v1/models."""
        return self.upstream.rstrip("/").removesuffix("/v1")


OWN = table_of(FrontSettings())
HOSTING = tuple(replace(setting, llama="") for setting in SETTINGS if setting.name in SHARED)


def _is_address(url: str) -> bool:
    """Return whether paths can follow a URL. A URL with a key is refused, since errors would show the key."""
    try:
        parts = urlsplit(url)
        usable = parts.hostname and (parts.port is None or parts.port)
    except ValueError:
        return False
    return bool(usable) and parts.scheme in ("http", "https") and not (parts.query or parts.fragment or "@" in parts.netloc)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the flags of a front."""
    add_settings(parser, (*OWN, *HOSTING))


def settings_of(arguments: argparse.Namespace) -> tuple[FrontSettings, Settings]:
    """Return a front's settings, and the settings of its port. Raises SettingsError."""
    own = FrontSettings(**{setting.name: getattr(arguments, setting.name) for setting in OWN})
    if not own.upstream:
        raise SettingsError("--upstream is missing: the address of an engine, such as http://127.0.0.1:8080")
    shared = {setting.name: getattr(arguments, setting.name) for setting in HOSTING}
    return own, Settings(**shared, port=own.port, ui=False)
