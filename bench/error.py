"""Errors that end a benchmark early.

BenchError      a precondition is wrong or missing; one clear message
  ServerError   a server did not start
  Skip          a scenario that cannot run here, which is not a failure
"""


class BenchError(Exception):
    """Ends the benchmark with its message and exit code 2."""


class ServerError(BenchError):
    """A server that did not start, with the end of its log."""


class Skip(BenchError):
    """A scenario that cannot run here, for example because its data is not on this machine. Exit code 0."""
