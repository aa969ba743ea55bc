"""The entry point of the command `slotcache`. ctrl-C ends it without a traceback, even while modules are imported."""

from __future__ import annotations

import signal
from importlib import import_module


def main() -> int:
    """Import the command, run it, and return its exit code. If ctrl-C ends the imports, a shell shows the code 130."""
    # If false, the process was started to ignore ctrl-C.
    takes_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if takes_interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    run = import_module(".cli", __package__).main
    if takes_interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
