"""The parts of a running front, and the number of requests that it relays at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..server.config.settings import Settings
from ..server.http.api_errors import RequestError
from ..server.http.bodies import LARGEST, Bodies, Reservation
from ..server.http.threads import PromptThreads
from .engines import Counting, Finder
from .lengths import Lengths
from .orders import FrontMetrics, Learning, Orders
from .prefills import Prefills
from .settings import FrontSettings
from .upstream import Upstream

MOST_PROBES = 16  # questions for the upstream's health, which anybody may ask
MOST_WARM_UPS = 16  # warm-ups at a time
LARGEST_WARM_UP = 1 << 20  # bytes of a warm-up's body


class Room:
    """Lets requests in, up to a limit. For one event loop only.

    most: how many requests may be relayed at a time.
    bodies: reads the requests' bodies.
    num_relayed: how many requests are relayed now.
    """

    def __init__(self, most: int, bodies: Bodies) -> None:
        self.bodies = bodies
        self._most, self.num_relayed, self._num_probes = most, 0, 0

    @contextmanager
    def relaying(self) -> Iterator[Reservation]:
        """Let a request in, and count it as relayed until its answer has ended. Raises RequestError 503."""
        if self.num_relayed >= self._most:
            full = f"{self._most:,} requests are being relayed, the front's --max-relayed: try again"
            raise RequestError(full, status=503, retry_after=1)
        self.num_relayed += 1
        try:
            with Reservation(self.bodies) as reservation:
                yield reservation
        finally:
            self.num_relayed -= 1

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Let in a request for the upstream's health. A request for the upstream's health has no body.

        Raises RequestError 503.
        """
        if self._num_probes >= MOST_PROBES:
            raise RequestError("the upstream is silent, and others ask for its health: try again", status=503, retry_after=1)
        self._num_probes += 1
        try:
            yield
        finally:
            self._num_probes -= 1


class WarmUps:
    """Requests for one token, which prefill the prompt before the documents while the client still searches for them.
    For one event loop only.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def has_room(self, num_bytes: int) -> bool:
        """Return whether another warm-up may start.

        num_bytes: the size of the warm-up's body.
        """
        return len(self._tasks) < MOST_WARM_UPS and num_bytes <= LARGEST_WARM_UP

    def start(self, work: Coroutine[object, object, None]) -> None:
        """Start a warm-up, and return without waiting for its end."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Stop all warm-ups."""
        for task in self._tasks:
            task.cancel()


# ---- The parts of a running front. --------------------------------------------------------------------------------------

COUNTED = 4  # token counts are remembered for this many times the documents that the upstream should have


@dataclass(slots=True)
class FrontState:
    """The state of a front.

    settings: the front's own settings.
    hosting: the settings of the front's port.
    threads: the threads that read, order and write chats.
    """

    settings: FrontSettings
    hosting: Settings
    upstream: Upstream
    finder: Finder
    orders: Orders
    counting: Counting
    learning: Learning
    metrics: FrontMetrics
    room: Room
    threads: PromptThreads
    prefills: Prefills = field(default_factory=Prefills)
    warm_ups: WarmUps = field(default_factory=WarmUps)

    @classmethod
    def of(cls, settings: FrontSettings, hosting: Settings) -> FrontState:
        """Make the state. The state's `upstream` is opened when the application starts."""
        lengths = Lengths(COUNTED * settings.tree_nodes)
        orders = Orders(settings, lengths)
        metrics = FrontMetrics(lambda: len(orders))
        most = hosting.max_body << 20
        upstream = Upstream(settings, has_keys=bool(hosting.api_key or hosting.api_key_file))
        return cls(
            settings,
            hosting,
            upstream=upstream,
            finder=Finder(upstream, settings.dialect),
            orders=orders,
            counting=Counting(upstream, lengths),
            learning=Learning(orders, metrics),
            metrics=metrics,
            room=Room(settings.max_relayed, Bodies.up_to(most)),
            threads=PromptThreads(LARGEST * most),
        )
