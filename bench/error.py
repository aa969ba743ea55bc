"""What ends a bench early.

BenchError      something needed is wrong or missing; one clear message
  ServerError   a server did not start
  Skip          a part that cannot run here, which is no failure
"""


class BenchError(Exception):
    """Ends the bench with its message and exit code 2."""


class ServerError(BenchError):
    """A server that did not start, with the end of its log."""


class Skip(BenchError):
    """What was asked for cannot run here, such as a trace whose data is not on this machine. Exit code 0."""
