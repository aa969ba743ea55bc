"""`slotcache order`: a front on a port, until ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from contextlib import suppress

import uvicorn

from ..server.edge.connection import Connection
from ..server.flags.setting import SettingsError
from ..server.settings import Settings
from .app import make_app
from .host import Host
from .settings import Front, settings_of

logger = logging.getLogger("slotcache")
GRACE = 5.0  # s that answers already under way have at shutdown
LAST = 3  # s for their last event, to clients that read slowly


class Server(uvicorn.Server):
    """uvicorn, which ends the answers that take longer at shutdown with an error, instead of breaking them off."""

    def __init__(self, config: uvicorn.Config, host: Host) -> None:
        super().__init__(config)
        self._host = host

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_answers())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_answers(self) -> None:
        await asyncio.sleep(GRACE)
        await self._host.upstream.close()


def order(chosen: argparse.Namespace) -> int:
    """Serve until a signal; the exit code. 2: these settings cannot be served."""
    try:
        settings, hosting = settings_of(chosen)
        server, _ = make_server(settings, hosting)
    except SettingsError as error:
        print(f"slotcache: {error}", file=sys.stderr)
        return 2
    hosts = [f"[{name}]" if ":" in name else name for name in hosting.hosts]
    addresses = ", ".join(f"http://{name}:{hosting.port}" for name in hosts)
    logger.info("documents that come to %s are ordered for %s", addresses, settings.base)
    with suppress(KeyboardInterrupt):
        asyncio.run(server.serve())
    return 0


def make_server(settings: Front, hosting: Settings) -> tuple[uvicorn.Server, Host]:
    """Make a server, not running yet, and its host. Raises SettingsError."""
    host = Host.of(settings, hosting)
    config = uvicorn.Config(
        make_app(host),
        host=hosting.hosts,  # type: ignore[arg-type]  # as asyncio takes it
        port=hosting.port,
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=round(GRACE) + LAST,
    )
    return Server(config, host), host
