"""The settings of replicas on Ray Serve: a server's settings, and the number of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

from ..server.config.flags import from_environment, variable_of
from ..server.config.settings import SETTINGS, Setting, Settings, SettingsError, Value, row, table_of, written
from ..slots.store.private_folder import lock, own_folder

ROUTER = "slotcache.front.ray_router:CacheRouter"
OF_RAY = ("host", "port", "ssl_key_file", "ssl_cert_file")  # Ray's proxy has the port: `http_options` of Serve's YAML
LISTENS = "Ray's proxy listens; `http_options` of Serve's YAML says where"
LOGGED = "Ray logs the arguments: set SLOTCACHE_API_KEY where the application is started, or api_key_file"
NO_ARGUMENTS = dict.fromkeys(OF_RAY, LISTENS) | {"api_key": LOGGED}


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The settings of a deployment that a single server does not have."""

    replicas: int = row(2, (), "replicas that are up from the start, and at least", least=1)
    max_replicas: int = row(0, (), "most replicas, which come as requests wait; 0: always as many as at the start")
    upscale_delay: int = row(30, (), "seconds of much work before a replica comes")
    downscale_delay: int = row(600, (), "seconds of little work before a replica ends, and its cache with it")
    replica_gpus: int = row(-1, (), "GPUs of a replica; -1: one, if llama.cpp finds a GPU where the application is started, else none", least=-1)
    router: str = row(ROUTER, (), "the class that chooses a replica for each request, such as one of Ray's own")
    # fmt: on

    @property
    def most(self) -> int:
        """The most replicas that may be up."""
        return max(self.replicas, self.max_replicas)


OWN = table_of(Replicas())


def read_settings(arguments: Mapping[str, object]) -> tuple[Replicas, Settings]:
    """Return the settings of a deployment and of its servers. Raises SettingsError.

    arguments: settings in Serve's YAML, by name. A setting that `arguments` lack comes from the environment, or has its
    default.
    """
    known = {setting.name: setting for setting in (*OWN, *SETTINGS)}
    for name in arguments:
        if name in NO_ARGUMENTS:
            raise SettingsError(f"{name}: {NO_ARGUMENTS[name]}")
        if name not in known:
            raise SettingsError(f"{name}: no such setting; expected one of {', '.join(known)}")
    values = {name: _value(setting, arguments) for name, setting in known.items() if name not in OF_RAY}
    own = Replicas(**{setting.name: values.pop(setting.name) for setting in OWN})  # type: ignore[arg-type]
    if 0 < own.max_replicas < own.replicas:
        raise SettingsError(f"max_replicas={own.max_replicas}: expected {own.replicas} or more, as replicas says; or 0")
    given = frozenset(name for name in values if name in arguments or variable_of(known[name]))
    return own, Settings(**values, given=given)  # type: ignore[arg-type]


def _value(setting: Setting, arguments: Mapping[str, object]) -> Value:
    if setting.name not in arguments:
        try:
            return from_environment(setting)
        except SystemExit as error:  # a Ray worker that exits shows no message
            raise SettingsError(str(error)) from None
    given = arguments[setting.name]
    try:
        return setting.parse(_as_text(setting, given))
    except ValueError as error:
        raise SettingsError(f"{setting.name}={given!r}: {error}") from None


def _as_text(setting: Setting, given: object) -> str:
    """Return a value from YAML as the text that the command line would have. Raises ValueError if the type does not fit.

    A text, such as the name of a file, may need quotes in YAML: without them, `yes` is a switch, and `010` is the number 8.
    """
    if isinstance(given, str):
        return given
    if isinstance(given, bool) and (setting.is_switch or setting.choices):
        return written(given)
    if isinstance(given, int | float) and not isinstance(given, bool) and not isinstance(setting.default, bool | str):
        return str(given)
    if setting.is_switch:
        raise ValueError("expected on or off")
    if setting.choices:
        raise ValueError(f"expected one of {', '.join(setting.choices)}")
    raise ValueError("expected a text in quotes" if isinstance(setting.default, str) else "expected a number")


def at_rank(settings: Settings, rank: int) -> Settings:
    """Return the settings of one replica, with a cache folder for its rank.

    After this replica ends, the next replica of its rank uses the folder. But when a replica ends, Ray may also give its
    rank to a running replica. The running replica keeps the folder of its old rank, and a new replica may get this old rank.
    So that no two replicas share a folder, each process locks its folder until it ends. If the folder of a new replica's
    rank is locked, the replica takes the first folder that is not locked.
    """
    if not settings.cache_dir:
        return settings
    whole = own_folder(Path(settings.cache_dir).expanduser(), "--cache-dir")
    number = next(number for number in chain((rank,), count()) if _locks(whole / f"replica-{number}.lock"))
    return replace(settings, cache_dir=str(whole / f"replica-{number}"))


def _locks(file: Path) -> bool:
    """Lock a file until this process ends; return False if another process has it."""
    try:
        lock(file)
    except BlockingIOError:
        return False
    return True
