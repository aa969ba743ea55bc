"""Checks whether the addresses of a server are free, finds the process that uses a port, and opens socket files."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ..config.settings import Settings

LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp
MOST_TRIED = 100  # ports to try after a port in use


def why_taken(settings: Settings) -> str:
    """Return why a server cannot listen at its addresses, and a remedy.

    Return an empty text if the server can listen, or if the reason is unknown.
    """
    if not (settings.hosts or settings.socket_files):
        return "--host is empty: expected an address, such as 127.0.0.1, or 0.0.0.0 for all"
    return _why_no_port(settings.hosts, settings.port) or _why_no_files(settings.socket_files)


def _why_no_port(hosts: Sequence[str], port: int) -> str:
    for host in hosts:
        error = _error_of(host, port)
        if error == errno.EADDRINUSE:
            owner = _owner(port)
            return f"port {port} is taken{f' by {owner}' if owner else ''}: --port {_free_after(hosts, port)}"
        if error == errno.EACCES:
            return f"port {port}: this user may not listen there: --port 8080, for example"
        if error == errno.EADDRNOTAVAIL:
            return f"--host {host}: this machine has no such address: expected one of its own, or 0.0.0.0 for all"
    return ""


def _error_of(host: str, port: int) -> int:
    """Try to listen on a port. Return the number of the error, or 0 if listening works."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as asyncio does
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
                probe.listen(1)
    except (socket.gaierror, UnicodeError):  # the host name is unknown
        return errno.EADDRNOTAVAIL
    except OSError as error:
        return error.errno or 0
    return 0


def _free_after(hosts: Sequence[str], port: int) -> int:
    """Return the first free port after `port`. If no free port is found, return the port after `port`."""
    some = range(port + 1, min(port + MOST_TRIED, 65536))
    return next((one for one in some if not any(_error_of(host, one) for host in hosts)), port + 1)


def _owner(port: int) -> str:
    """Return the process that listens on a port.

    Return an empty text if this user may not see the process, or if the system has no /proc.
    """
    wanted = {f"socket:[{inode}]" for inode in _inodes(port)}
    for folder in Path("/proc").glob("[0-9]*/fd") if wanted else ():
        with suppress(OSError):
            if any(os.readlink(folder / name) in wanted for name in os.listdir(folder)):
                name = (folder.parent / "comm").read_text().strip()
                return f"pid {folder.parent.name} ({name})"
    return ""


def _inodes(port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on a port."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


# ---- Socket files: `--host server.sock`. --------------------------------------------------------------------------------


def _why_no_files(paths: Sequence[str]) -> str:
    return next((f"--host {path}: {why}" for path in paths if (why := _why_no_file(Path(path)))), "")


def _why_no_file(file: Path) -> str:
    """Return why a server cannot listen on a socket file, or an empty text if it can.

    A file that an earlier server left can be used again.
    """
    if not hasattr(socket, "AF_UNIX"):
        return "this platform has no socket files"
    if not os.access(file.parent, os.W_OK | os.X_OK):
        return f"{file.parent} is not a folder that this user may write to"
    if file.exists() and not file.is_socket():
        return "the file is not a socket: expected an unused name"
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(file))
        except (FileNotFoundError, ConnectionRefusedError):
            return ""
        except OSError as error:  # such as a path that is too long
            return error.strerror or str(error)
    return "another server listens there: expected an unused name"


def listen_at(path: str, backlog: int) -> socket.socket:
    """Return a socket that listens on a socket file. A file at the path is replaced. Raises OSError.

    Users who may write to the socket file may connect. The umask decides which users may write to the file.

    backlog: how many new connections the system queues.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(path)
        listening.listen(backlog)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening
