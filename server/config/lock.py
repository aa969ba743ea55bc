"""Locks on files: of several processes, one at a time has what a lock stands for."""

from __future__ import annotations

import errno
import os
from pathlib import Path

MOST_SERVERS = 16  # that share a folder: each has a place of its own in it


def lock(file: Path) -> int:
    """Lock a file, which is made if it is missing, until its descriptor is closed or this process ends.

    Return the descriptor. Raises BlockingIOError if it is locked already, and OSError, also where there are no such locks.
    """
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        os.close(descriptor)
        raise OSError(errno.ENOTSUP, "this platform has no flock", str(file)) from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
