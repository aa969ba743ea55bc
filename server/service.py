"""A loaded model with everything that serves it: made once at start, handed to the routes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

import llama_cpp

from ..models.chat import DEFAULT_TEMPLATE, ChatTemplate, TemplateError
from ..models.context import MAX_SEQUENCES, Context, ContextSettings
from ..models.device import devices
from ..models.errors import ModelError
from ..models.model import Model
from ..models.runner import Runner
from ..models.sampling import Sampler
from ..models.text import TextStream
from ..slots.host import HostTier
from ..slots.replacement import Replacement
from ..slots.request import Request
from ..slots.scheduler import Scheduler
from ..slots.snapshots import Snapshots
from ..slots.tree import PrefixTree
from .builder import PromptBuilder
from .conversations import Conversations, Origin
from .disk import DiskTier
from .engine import Engine
from .errors import RequestError
from .generation import End, Event, Failure, Generation
from .idle import Ahead, IdlePrefill
from .metrics import Metrics
from .prompt import ChatPrompt
from .settings import Settings
from .tokens import AnswerMemory
from .turn import Turn
from .wire import ChatRequest, Options

logger = logging.getLogger("slotcache")
DEFAULT_CONTEXT = 16384  # cells, where the model was trained for more and nobody asked for more


@dataclass(slots=True, eq=False)
class Service:
    """What the routes work with. open: generations that were accepted and have not had their final event."""

    settings: Settings
    name: str
    model: Model
    context: Context
    engine: Engine
    builder: PromptBuilder
    template: str
    metrics: Metrics
    limit: int  # tokens a prompt and its answer may have together
    open: set[Generation]
    ids: itertools.count
    conversations: Conversations
    idle: IdlePrefill
    disk: DiskTier | None

    def origin(self, asked: ChatRequest) -> Origin | None:
        """What a chat goes on from, if it has to do with a conversation. Raises RequestError where that is not known."""
        asked.check()
        return self.conversations.origin(asked, self._caches(asked))

    def submit(self, prompt: ChatPrompt, options: Options, turn: Turn | None = None) -> Generation:
        """Hand a prompt to the engine. Raises RequestError: too long, or the queue is full."""
        options.check()
        self._check_length(prompt)
        self._admit_to_queue()
        generation = self._generation(prompt, options)
        generation.turn = turn
        self.idle.stop()
        self.engine.submit(generation)
        self.open.add(generation)
        return generation

    def ahead(self, key: Hashable, prompt: ChatPrompt, options: Options) -> Future[bool]:
        """Have a prompt computed while nobody asks for anything; whether that is now. Raises RequestError: too long."""
        options.check()
        self._check_length(prompt)
        generation = self._generation(prompt, options)
        generation.request.background = True
        return self.engine.submit_background((options.cache_scope, key), generation)

    def _check_length(self, prompt: ChatPrompt) -> None:
        if prompt.num_tokens == 0:
            raise RequestError("the prompt is empty: expected at least one token")
        if prompt.num_tokens >= self.limit:
            raise RequestError(
                f"the prompt has {prompt.num_tokens} tokens and the context {self.limit}: "
                f"shorten it to {self.limit - 1} or start the server with a larger --ctx-size",
                code="context_length_exceeded",
                n_prompt_tokens=prompt.num_tokens,
                n_ctx=self.limit,
            )

    async def next_event(self, generation: Generation) -> Event:
        """The next event of a generation; accounts for it when it is the last one."""
        event = await generation.events.get()
        if isinstance(event, End):
            self.metrics.finished(event.report, event.reason)
            event = self._concluded(generation, event)
        elif isinstance(event, Failure):
            self.metrics.failed()
        if isinstance(event, End | Failure):
            self._close(generation)
        return event

    def abandon(self, generation: Generation) -> None:
        """Whoever waited for this generation has gone. Does nothing when it has had its final event."""
        if generation in self.open:
            self.metrics.cancelled()
            self.engine.cancel(generation)
            self._close(generation)

    def _concluded(self, generation: Generation, end: End) -> End:
        """Remember the turn of a whole answer; its end, with what became of the conversation. Of others nothing is kept."""
        request, turn = generation.request, generation.turn
        if turn is None:
            return end
        assert request.layout is not None
        entries = turn.entries(request.layout, "".join(generation.parts), generation.sampled)
        remembered = turn.origin is not None and self.conversations.remember(turn.origin, turn.id, entries)
        if self.settings.idle_prefill and request.cache and generation.limit:
            self.idle.add(Ahead(turn.asked, entries))
        return replace(end, report=replace(end.report, conversation=turn.report(remembered)))

    def _close(self, generation: Generation) -> None:
        self.open.discard(generation)
        if not self.open:
            self.idle.go_on()

    def close(self) -> None:
        self.engine.stop()
        if self.disk is not None:
            self.disk.close()
        self.context.close()
        self.model.close()

    def _admit_to_queue(self) -> None:
        room = self.settings.parallel + self.settings.max_queue
        if len(self.open) >= room:
            self.metrics.refused()
            raise RequestError(
                f"{len(self.open)} requests are running or waiting, which is as many as may: try again later",
                status=429,
                code="queue_full",
                retry_after=self.metrics.seconds_until_room(self.settings.parallel),
            )

    def _caches(self, options: Options) -> bool:
        """Whether a request may leave anything behind."""
        return self.settings.cache_prompt if options.cache_prompt is None else options.cache_prompt

    def _generation(self, prompt: ChatPrompt, options: Options) -> Generation:
        wanted, room = options.limit(), self.limit - prompt.num_tokens
        limit = room if wanted < 0 else min(wanted, room)
        asked = self._caches(options)
        number = next(self.ids)
        cache = asked and self.model.can_trim
        shared = ("shared", options.cache_scope)
        request = Request(
            number,
            prompt,
            max(limit, 1),
            shared if cache else ("private", number),
            cache,
            options.priority,
            snapshot_scope=shared if asked and self.snapshots.max_bytes else None,
        )
        request.owner = Generation(
            request,
            options.sampling(self.model.ends, self.model.num_vocab),
            TextStream(options.stops(), self.model.piece),
            limit,
            options.cache_scope,
            options.return_progress,
            self._why_not(asked, cache),
        )
        return request.owner

    @property
    def snapshots(self) -> Snapshots:
        return self.engine.scheduler.snapshots

    def _why_not(self, asked: bool, cache: bool) -> str | None:
        if not asked:
            return "cache_prompt is off"
        if cache:
            return None
        if self.snapshots.max_bytes:
            return "this model's state cannot be cut, and no snapshot of it goes further"
        return "this model keeps no KV that can be cut at a prefix, and --cache-ram leaves no room for snapshots"

    def properties(self) -> dict[str, Any]:
        """`/props`: llama-server's fields, and every setting."""
        return {
            "model_path": str(self.model.path),
            "model_alias": self.name,
            "total_slots": self.settings.parallel,
            "default_generation_settings": {"n_ctx": self.limit},
            "chat_template": self.template,
            "bos_token": self.model.bos,
            "eos_token": self.model.eos,
            "settings": {name: value for name, value in vars(self.settings).items() if name != "api_key"},
        }


def load(settings: Settings, path: Path, progress: Callable[[float], bool] | None = None) -> Service:
    """Load a model and make everything around it, the engine not yet started. Raises ModelError."""
    model = Model(path, settings.gpu_layers, progress, repack=settings.repack)
    if not model.can_chat:
        raise ModelError(f"{path} is not a text generation model: {model.description}")
    source = _template_source(settings, model)
    try:
        template = ChatTemplate(source, model.bos, model.eos)
    except TemplateError as error:
        raise ModelError(f"the chat template cannot be used: {error}") from None
    num_sequences = MAX_SEQUENCES if model.can_trim else 2 * settings.parallel + 2
    context = Context(model, _context_settings(settings, model, num_sequences))
    if settings.parallel > (most := (context.scratch - 1) // 2):
        raise ModelError(f"--parallel {settings.parallel}: at most {most} lanes with this model")
    limit = min(context.num_cells, model.context_train or context.num_cells)
    samplers: dict[int, Sampler] = {}
    runner = Runner(context, samplers)
    host_bytes = _host_bytes(settings)
    host = HostTier(host_bytes // max(_token_bytes(settings, model), 1), Replacement(settings.eviction))
    tree = PrefixTree(context.num_cells, context.scratch, host, Replacement(settings.eviction))
    scheduler = Scheduler(
        tree,
        settings.parallel,
        context.batch,
        settings.prefill_budget,
        settings.idle_cells,
        context.apart_from,
        settings.window,
        Snapshots(tree, 0 if model.can_trim else host_bytes),
    )
    answers = AnswerMemory()
    disk = DiskTier(_cache_folder(settings, model, context), settings.cache_disk << 20) if settings.cache_dir else None
    engine = Engine(model, scheduler, runner, samplers, answers, settings.check, disk)
    builder = PromptBuilder(model, template, answers, settings.document_order, settings.order_hint, settings.dedup)
    logger.info("%s", describe(model, context, settings))
    name = settings.alias or path.stem
    conversations = Conversations(settings.conversations, settings.conversation_ram << 20, settings.conversation_ttl)
    metrics = Metrics(engine, _token_bytes(settings, model), conversations, disk)
    ids = itertools.count(1)
    idle = IdlePrefill(model, engine, builder, limit, ids)
    return Service(
        settings, name, model, context, engine, builder, source, metrics, limit, set(), ids, conversations, idle, disk
    )


def start(service: Service) -> None:
    """Start the engine; its events go to the running event loop. What is on disk comes back meanwhile."""
    service.engine.start(asyncio.get_running_loop())
    if service.disk is not None:
        Thread(target=_load_from_disk, args=(service, service.disk), name="load", daemon=True).start()


def _load_from_disk(service: Service, disk: DiskTier) -> None:
    """Fill the host tier with what an earlier run of the server left."""
    host = service.engine.scheduler.tree.host
    service.engine.ask(lambda: None).result()  # the warm-up is over
    began, budget = perf_counter(), host.max_tokens * _token_bytes(service.settings, service.model)
    with contextlib.suppress(TimeoutError):
        count = disk.load(budget, service.engine.adopt)
        logger.info("%d runs came back from %s in %.1f s", count, disk.folder, perf_counter() - began)


def describe(model: Model, context: Context, settings: Settings) -> str:
    """One line: what was loaded, where its layers are, and what a token of KV takes."""
    gpu = next((device for device in devices() if device.is_gpu), None)
    on_gpu = min(settings.gpu_layers, model.num_layers + 1) if gpu else 0
    where = f"{on_gpu} of {model.num_layers + 1} layers on {gpu.description}" if gpu else "all layers on the CPU"
    per_token = _token_bytes(settings, model)
    return (
        f"{model.path.name}: {model.description}, {model.size / 2**20:,.0f} MiB, {where}; KV {per_token:,} bytes a token, "
        f"{context.num_cells:,} cells ({context.num_cells * per_token / 2**20:,.0f} MiB), {settings.parallel} lanes"
    )


def _template_source(settings: Settings, model: Model) -> str:
    if not settings.chat_template_file:
        return model.chat_template or DEFAULT_TEMPLATE
    try:
        return Path(settings.chat_template_file).read_text("utf-8")
    except OSError as error:
        raise ModelError(f"cannot read the chat template {settings.chat_template_file}: {error.strerror}") from None


def _token_bytes(settings: Settings, model: Model) -> int:
    return model.kv_bytes(settings.cache_type_k, settings.cache_type_v)


def _host_bytes(settings: Settings) -> int:
    """What the host tier may take: --cache-ram, but never more than half of the memory that is free now."""
    wanted, most = settings.cache_ram << 20, _free_memory() // 2
    if wanted > most:
        logger.info("--cache-ram %s MiB is more than half of the free memory: %s MiB it is", settings.cache_ram, most >> 20)
    return min(wanted, most)


def _cache_folder(settings: Settings, model: Model, context: Context) -> Path:
    """Where the KV of this model lies, computed with these settings: another folder for whatever makes it differ."""
    parts = (
        model.digest(),
        context.num_cells if model.rope_depends_on_context else 0,
        llama_cpp.__version__,
        *(device.description for device in devices()),
        *(getattr(settings, name) for name in ("cache_type_k", "cache_type_v", "flash_attn", "repack", "gpu_layers")),
    )
    name = hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
    return Path(settings.cache_dir).expanduser() / name


def _free_memory() -> int:
    """Bytes that programs may still take: what the page cache holds counts, a model that was just read most of all."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo") as lines:
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _context_settings(settings: Settings, model: Model, num_sequences: int) -> ContextSettings:
    num_cells = settings.ctx_size or min(model.context_train or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    return ContextSettings(
        num_cells,
        max(settings.batch_size, settings.parallel),
        settings.ubatch_size,
        settings.flash_attn,
        settings.cache_type_k,
        settings.cache_type_v,
        settings.threads or len(os.sched_getaffinity(0)),
        num_sequences,
    )
