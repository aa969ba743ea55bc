"""The entry of the command `slotcache`: ctrl-C ends it without a traceback even while its modules are loaded."""

from __future__ import annotations

import signal
from importlib import import_module


def main() -> int:
    """Load the command and run it; return its exit code. A shell shows 130 if ctrl-C ends it while it is loaded."""
    takes_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it was started to ignore them
    if takes_interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    run = import_module(".cli", __package__).main
    if takes_interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
