"""The command `slotcache order`, which runs a front on a port until ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from contextlib import suppress
from dataclasses import replace

import uvicorn

from ..server.config.flags import given_among
from ..server.config.settings import Settings, SettingsError
from ..server.http.connection import KEEP_ALIVE, Connection
from ..server.http.connections import ListeningServer, most_connections
from ..server.http.ports import why_taken
from ..server.http.security import open_to
from .app import make_app
from .settings import HOSTING, FrontSettings, settings_of
from .state import FrontState

logger = logging.getLogger("slotcache")
GRACE = 5.0  # s that open answers have at shutdown
DESCRIPTORS = 2  # of a client's connection: its own, and the upstream connection for it
LAST = 3  # s for the last event of an answer that is ended, to clients that read slowly


class FrontServer(ListeningServer):
    """A uvicorn server that ends slow answers at shutdown with an error, instead of breaking them off."""

    def __init__(self, config: uvicorn.Config, state: FrontState) -> None:
        super().__init__(config, most_connections(DESCRIPTORS), state.hosting)
        self._state = state

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        logger.info("documents that come to %s are ordered for %s", ", ".join(self.addresses), self._state.settings.base)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_answers())
        await super().shutdown(sockets)
        ending.cancel()
        if self.force_exit:  # a second ctrl-C, after which uvicorn does not end the lifespan
            await self.lifespan.shutdown()

    async def _end_answers(self) -> None:
        await asyncio.sleep(GRACE)
        await self._state.upstream.close()


def order(chosen: argparse.Namespace) -> int:
    """Serve until a signal comes. Return the exit code, which is 2 if the chosen settings cannot be served."""
    try:
        settings, hosting = settings_of(chosen)
        hosting = replace(hosting, given=given_among(chosen, HOSTING))
        if why := why_taken(hosting):
            raise SettingsError(why)
        server, _ = make_server(settings, hosting)
    except SettingsError as error:
        print(f"slotcache: {error}", file=sys.stderr)
        return 2
    with suppress(KeyboardInterrupt):
        asyncio.run(server.serve())
    return 0


def make_server(settings: FrontSettings, hosting: Settings) -> tuple[uvicorn.Server, FrontState]:
    """Make a server that does not run yet, and the server's state. Raises SettingsError."""
    state = FrontState.of(settings, hosting)
    config = uvicorn.Config(
        make_app(state),
        host=hosting.hosts,  # type: ignore[arg-type]  # as asyncio takes it
        port=hosting.port,
        loop="asyncio",
        http=Connection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=round(GRACE) + LAST,
        timeout_keep_alive=KEEP_ALIVE,
    )
    if line := open_to(hosting):
        logger.warning(line)
    return FrontServer(config, state), state
