"""The entry point of the command `slotcache`. ctrl-C ends it without a traceback, even while its modules are loaded."""

from __future__ import annotations

import signal
from importlib import import_module


def main() -> int:
    """Load the command, run it, and return its exit code. If ctrl-C ends it during loading, a shell shows the code 130."""
    # False: the process was started so that it ignores ctrl-C.
    takes_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if takes_interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    run = import_module(".cli", __package__).main
    if takes_interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
