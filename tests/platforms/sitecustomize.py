"""Takes from this package's modules what another platform lacks; Python runs it first where this folder is in PYTHONPATH.

LACKS names the platform. Other packages see the real modules: they know what to do there, and this machine is none of it.
"""

from __future__ import annotations

import builtins
import os
import signal
import sys
from types import ModuleType

LINUX_CALLS = {"sched_getaffinity", "sched_setaffinity", "posix_fadvise", "fdatasync", "O_DIRECT", "O_PATH", "O_TMPFILE"}
UNIX_CALLS = {
    *("fork", "forkpty", "geteuid", "getuid", "getegid", "getgid", "nice", "getpriority", "setpriority", "PRIO_PROCESS"),
    *("sysconf", "O_NONBLOCK", "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_SYNC", "fchmod", "fchown", "chown", "mkfifo"),
    *("statvfs", "killpg", "setsid", "getpgid", "pread", "pwrite", "getloadavg", "uname", "register_at_fork", "WNOHANG"),
}
SIGNALS = {"SIGINT", "SIGTERM"}
UNIX_SIGNAL_CALLS = {"alarm", "setitimer", "getitimer", "ITIMER_PROF", "ITIMER_REAL", "ITIMER_VIRTUAL", "pthread_kill"}
PLATFORMS = {
    "macos": {"os": LINUX_CALLS},
    "windows": {
        **dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty")),
        "os": LINUX_CALLS | UNIX_CALLS,
        "signal": UNIX_SIGNAL_CALLS
        | {name for name in dir(signal) if name.startswith("SIG") and name[3].isalpha()} - SIGNALS,
    },
}
"""Of each platform, modules without some names; None: a module that it has not."""


class Lacking(ModuleType):
    """A module as another platform has it."""

    def __init__(self, module: ModuleType, lacks: set[str], changed: dict[str, object]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update({name: value for name, value in vars(module).items() if name not in lacks} | changed)


def no_files_of_the_kernel(event: str, arguments: tuple) -> None:
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


def sysconf(name: str) -> int:
    """macOS does not tell how much memory is free."""
    if "AVPHYS" in name:
        raise ValueError("unrecognized configuration name")
    return os.sysconf(name)


def install(platform: str) -> None:
    lacks = PLATFORMS[platform]
    changed: dict[str, object] = {"sysconf": sysconf} if platform == "macos" else {"supports_dir_fd": set()}
    seen = {
        name: Lacking(sys.modules[name], names, changed if name == "os" else {}) for name, names in lacks.items() if names
    }
    real = builtins.__import__

    def lacking(name, globals=None, locals=None, fromlist=(), level=0):
        if level == 0 and (globals or {}).get("__name__", "").startswith("slotcache."):
            if lacks.get(name, seen) is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in seen:
                return seen[name]
        return real(name, globals, locals, fromlist, level)

    builtins.__import__ = lacking
    sys.addaudithook(no_files_of_the_kernel)


if platform := os.environ.get("LACKS"):
    install(platform)
