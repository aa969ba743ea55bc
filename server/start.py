"""The entry of the command `slotcache`: ctrl-C ends it without a traceback while its modules are loaded, too."""

from __future__ import annotations

import signal
from importlib import import_module


def main() -> int:
    """Load the command and run it; return its exit code. A shell shows 130 for one that ctrl-C ends before it runs."""
    takes_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it was started to ignore them
    if takes_interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    run = import_module(".cli", __package__).main
    if takes_interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
