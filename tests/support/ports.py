"""Ports for the servers of tests, which no other program takes meanwhile.

The system assigns free ports above 32768 to any program, including clients. A port from there that was free a moment ago
may be taken before a new server listens on it. These ports are lower, and each process of a test run has its own.
"""

import os
import socket
from itertools import cycle

FIRST, EACH = 12_000, 2_000
NUMBER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 10
START = os.getpid() * 37 % EACH  # another test run at the same time has another start
PORTS = cycle(FIRST + EACH * NUMBER + (START + at) % EACH for at in range(EACH))


def free_port() -> int:
    """Return a port on which no program listens, a different port each time."""
    for port in PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError
