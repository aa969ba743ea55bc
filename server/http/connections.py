"""The open connections of a server. Their number is limited. At the limit, connections that wait for clients are closed.

    new ---> waits for its client (a head, the rest of a body, the next request) ---> works (an answer is open) ---> waits
                              |
                              +--- closed when the limit is reached, the longest waiting connection first

A time limit for waiting could not replace the limit on the number of connections. Any time limit would be too long for a
full server, or too short for a server with few connections.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from ssl import SSLContext
from types import FrameType
from typing import Protocol

import uvicorn
from uvicorn.server import ServerState

from ..config.settings import UNSET, Settings
from .ports import listen_at
from .tls import tls_context

logger = logging.getLogger("slotcache")
MOST = 2048  # connections; each takes about 40 KiB (55 under TLS), and up to 128 KiB with an incomplete body
LEAST = 8
KEPT = 64  # the fewest file descriptors left for other uses: the cache, the index, pipes, the engine's devices
SELDOM = 60.0  # s between two log lines about the same shortage


class WaitingConnection(Protocol):
    @property
    def may_end(self) -> bool:
        """Whether the connection may be closed without a loss: no answer is open, and no body makes progress."""
        ...

    def end(self) -> None: ...


class Connections(ServerState):
    """uvicorn's shared state of all connections, with a limit on their number. Only the event loop may use this object.

    most: the most connections that may be open.
    arriving: accepted connections that uvicorn has not yet put into `connections`.
    tls: the TLS context of all connections; None for plain HTTP.
    """

    def __init__(self, most: int, tls: SSLContext | None = None) -> None:
        super().__init__()
        self.most, self.tls, self.arriving = most, tls, set[object]()
        self._waiting: OrderedDict[WaitingConnection, None] = OrderedDict()  # the longest waiting first
        self._logged: dict[str, float] = {}

    def waits(self, connection: WaitingConnection) -> None:
        """Add a connection to the connections that wait for their clients.

        A connection that already waits keeps its place in the order.
        """
        self.arriving.discard(connection)
        self._waiting.setdefault(connection)

    def works(self, connection: WaitingConnection) -> None:
        """Remove a connection that works or has ended from the connections that wait for their clients."""
        self._waiting.pop(connection, None)

    @property
    def are_full(self) -> bool:
        """Whether the limit of connections is reached."""
        return len(self.connections) + len(self.arriving) >= self.most

    def make_room(self) -> bool:
        """Close waiting connections until there is room for a new one.

        Return False if there is no room because all connections are at work.
        """
        while self.are_full:
            if not self.end_one():
                if not self.arriving:
                    self.log("all %d connections are at work: a new connection waits until one of them ends", self.most)
                return False
            self.log("all %d connections are open: the longest idle ones are closed for new ones", self.most)
        return True

    def end_one(self) -> bool:
        """Close the connection that has waited longest for its client. Return False if no connection may be closed."""
        for _ in range(len(self._waiting)):
            connection, _ = self._waiting.popitem(last=False)
            if connection.may_end:
                self.connections.discard(connection)  # type: ignore[arg-type]
                connection.end()
                return True
            self._waiting[connection] = None  # its body makes progress
        return False

    def log(self, line: str, *figures: object) -> None:
        """Log a line about a shortage. The same line is logged at most once a minute."""
        now = time.monotonic()
        if now >= self._logged.get(line, now):
            self._logged[line] = now + SELDOM
            logger.warning(line, *figures)


def most_connections(descriptors: int = 1) -> int:
    """Return how many connections a process may have. A share of its file descriptors (`ulimit -n`) stays free.

    descriptors: the number of file descriptors of each connection.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MOST
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MOST
    return max(min((limit - max(limit // 4, KEPT)) // descriptors, MOST), LEAST)


# ---- Accepts new connections, a few at a time, and only if there is room. -----------------------------------------------
#
# asyncio would accept up to 2,048 connections before it reads from an open connection. If the process runs out of file
# descriptors, asyncio logs a traceback for each new connection and pauses for a second.

AT_ONCE = 16  # connections that are accepted before open connections have their turn
PAUSE = 0.05  # seconds until the next attempt if no connection can be accepted


class ConnectionListener:
    """Accepts connections on a listening socket. make: makes the asyncio protocol of a new connection."""

    def __init__(self, listening: socket.socket, connections: Connections, make: Callable[[], asyncio.Protocol]) -> None:
        self._socket, self._connections, self._make = listening, connections, make
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._taking: set[asyncio.Task[object]] = set()
        self._listen()

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket, self._take)

    def _take(self) -> None:
        for number in range(AT_ONCE):
            if number and self._connections.are_full:
                return  # make room only for the first connection: no other is certain to wait
            if not self._connections.make_room():
                self._wait()
                return
            try:
                taken, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # no more connections wait, or the client has disconnected
            except OSError as error:  # the process has no free descriptor, or the system no memory
                self._connections.log("a new connection cannot be accepted now: %s (ulimit -n)", error)
                self._connections.end_one()
                self._wait()
                return
            made = self._make()
            taking = self._loop.create_task(self._loop.connect_accepted_socket(lambda made=made: made, taken))
            self._connections.arriving.add(made)
            self._taking.add(taking)
            taking.add_done_callback(partial(self._taken, made))

    def _taken(self, made: asyncio.Protocol, taking: asyncio.Task[object]) -> None:
        self._taking.discard(taking)
        self._connections.arriving.discard(made)
        if not taking.cancelled() and (error := taking.exception()):
            self._connections.log("a new connection could not be opened: %r", error)

    def _wait(self) -> None:
        """Accept nothing for `PAUSE` seconds, while the system queues new connections."""
        self._loop.remove_reader(self._socket)
        self._pause = self._loop.call_later(PAUSE, self._listen)


class ListeningServer(uvicorn.Server):
    """uvicorn with TLS, socket files, and a limit on the number of its connections.

    The server's config needs `loop="asyncio"`, since other event loops accept connections themselves. Raises SettingsError
    for TLS files that cannot be used.

    most: the most connections that may be open.
    settings: the settings with the addresses, socket files and TLS files.
    """

    def __init__(self, config: uvicorn.Config, most: int, settings: Settings = UNSET) -> None:
        super().__init__(config)
        self.server_state = self._connections = Connections(most, tls_context(settings))
        self._settings = settings
        self._listeners: list[ConnectionListener] = []

    async def listening(self) -> list[str]:
        """Wait until the server listens, and return its `addresses`. The list is empty if the server ends first."""
        while not (self.started or self.should_exit):
            await asyncio.sleep(0.01)
        return self.addresses if self.started else []

    @property
    def addresses(self) -> list[str]:
        """The server's URLs with the hosts of the settings, followed by the server's socket files as `unix:PATH`.

        If the settings give port 0, the URLs have the IP addresses and the port that the system chose.
        """
        scheme = "https" if self._connections.tls else "http"
        places = [(name, self._settings.port) for name in self._settings.hosts]
        if not self._settings.port:
            places = [one.getsockname()[:2] for server in self.servers for one in server.sockets]
        urls = [f"{scheme}://{f'[{name}]' if ':' in name else name}:{port}" for name, port in places]
        return [*urls, *(f"unix:{path}" for path in self._settings.socket_files)]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        files = [listen_at(path, self.config.backlog) for path in self._settings.socket_files]
        await super().startup(sockets if self._settings.hosts else [])
        loop = asyncio.get_running_loop()
        taken = [one for server in self.servers for one in server.sockets]
        for listening in taken:
            loop.remove_reader(listening)  # asyncio's own
        for listening in [*(one.dup() for one in taken), *files]:
            self._listeners.append(ConnectionListener(listening, self._connections, self._make_connection))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self._listeners:
            listener.close()
        for path in self._settings.socket_files:
            Path(path).unlink(missing_ok=True)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to shut down. At a second ctrl-C, shut down without waiting for requests.

        When uvicorn ends, it raises all captured signals again. This server raises only the first signal again.
        """
        super().handle_exit(sig, frame)
        del self._captured_signals[1:]

    def _make_connection(self) -> asyncio.Protocol:
        made = self.config.http_protocol_class
        return made(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[call-arg]
