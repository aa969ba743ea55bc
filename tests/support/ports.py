"""Ports for the servers of tests, which no other program is given meanwhile.

The system gives any free port above 32768 to whoever asks for one, also to clients: a port that was free a moment ago may be
taken when a server that has just started listens on it. These lie below, and each process of a run has its own.
"""

import os
import socket
from itertools import cycle

FIRST, EACH = 12_000, 2_000
NUMBER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 10
START = os.getpid() * 37 % EACH  # a run beside this one has another start
PORTS = cycle(FIRST + EACH * NUMBER + (START + at) % EACH for at in range(EACH))


def free_port() -> int:
    """Return a port that no program listens on, and another one each time."""
    for port in PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError
