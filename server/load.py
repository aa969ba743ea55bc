"""Builds all parts of a server from its settings: the model, the cache with its tiers, the engine, the search."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import convert

from ..models import gate, llama
from ..models.context import Context, DevicePart, breakdown, parts_of
from ..models.draft_model import DraftModel, open_draft_model
from ..models.errors import ModelError, NotCounted
from ..models.grammar import Grammars
from ..models.hardware import devices, fast_cores, free_memory, unloaded_backends, unused_card
from ..models.heap import return_large_blocks
from ..models.jinja import TemplateError
from ..models.learning import learn_costs
from ..models.libraries import hide_slower_card
from ..models.lora import Adapters
from ..models.model import ALL_LAYERS, Model
from ..models.multi_token import open_head, why_unused
from ..models.named_templates import DEFAULT_TEMPLATE, named_template, names
from ..models.runner import Runner
from ..models.sampling_params import recommended
from ..models.split import ALL_CARDS
from ..models.template import ChatTemplate
from ..models.timing import MayGoOn
from ..slots.drafts import Drafts
from ..slots.eviction import EvictionPolicy
from ..slots.host import HostMemory
from ..slots.prefix_tree import PrefixTree
from ..slots.radix import CopySizes
from ..slots.scheduler import Scheduler
from ..slots.scope import Scope
from ..slots.separate import SeparateDocuments
from ..slots.snapshots import Snapshots
from ..slots.store.archive import COMMON, ImportedTier, Origin, of_any_machine, write_origin
from ..slots.store.disk import DiskTier
from ..slots.store.private_folder import own_folder
from ..slots.store.record_file import Provenance
from ..slots.store.tier import LowerTier
from .chat.body import MOST_SCALE, Scale
from .chat.builder import PromptBuilder
from .chat.conversation_files import ConversationFiles, HistoryVocabulary, free_conversation_files
from .chat.conversations import Conversations, PendingTurn
from .chat.sampling_fields import Defaults
from .chat.sessions import Sessions
from .chat.tokens import AnswerMemory
from .config.settings import VERSION, Settings, SettingsError, listed
from .engine.engine import Engine
from .engine.fit import Decision, LoadProgress, card_flag, context_settings, fit, mib, open_beside, open_model, with_layout
from .engine.generation import Generation
from .engine.view import View
from .http.bodies import LARGEST
from .http.threads import give_way
from .search.folder import check_read_ahead, load_folder_index
from .search.vectors import load_vectors
from .service.ahead import Ahead
from .service.idle import IdlePrefill
from .service.likely_prefixes import LikelyPrefixes, SharedPrefix
from .service.metrics import Metrics
from .service.models import Loaded
from .service.service import Service
from .service.submitter import CANNOT_DRAFT, Submitter

SAMPLE = 1 << 16  # bytes at the end of a model's file that count for the fingerprint
SLOW = 1.0  # s a token: the log warns of a slower model


def build_info() -> str:
    """Return the versions of llama.cpp and of this server, as one text."""
    return f"b{llama.LIBRARY.version}-slotcache-{VERSION}"


def fingerprint_of(settings: Settings, model: Model, template: str) -> str:
    """Return OpenAI's `system_fingerprint`. Servers with the same build, model, settings and devices have the same value.

    Like llama-server's fingerprint, it starts with llama.cpp's build number. Only the end of the model's file is read.
    """
    with model.path.open("rb") as file:
        file.seek(max(model.path.stat().st_size - SAMPLE, 0))
        end = file.read(SAMPLE)
    parts = (VERSION, model.description, model.size, end, template, *_shaping(settings, model))
    return f"b{llama.LIBRARY.version}-{hashlib.blake2b(repr(parts).encode(), digest_size=4).hexdigest()}"


def provenance_of(settings: Settings, model: Model, context: Context) -> Provenance:
    """Return the digests of the model and the settings that decide this server's KV. Raises ModelError.

    The first call reads the whole file of the model.
    """
    parts = (
        context.num_cells if model.rope_depends_on_context else 0,
        gate.identity(),
        *_shaping(settings, model),
        *_spread(model, context),
    )
    return Provenance(model.digest(), _digest(parts))


def origin_of(settings: Settings, model: Model, context: Context) -> Origin:
    """Return the origin of this server's KV in words: the model, the build and the devices."""
    shape = (context.num_cells if model.rope_depends_on_context else 0, *_asked(settings, model))
    return Origin(
        model=f"{model.path.name}, {model.description}",
        build=f"{build_info()}, {', '.join(device.description for device in devices())}",
        machine=machine(),
        shape=_digest(shape),
    )


def machine() -> str:
    """Return a digest of the build, the CPU and the devices that compute KV on this machine."""
    return _digest((gate.identity(), *(device.description for device in devices())))


def _digest(parts: tuple[object, ...]) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _shaping(settings: Settings, model: Model) -> tuple[object, ...]:
    """Return the devices and the settings that affect KV."""
    return (*(device.description for device in devices()), *_asked(settings, model))


def _asked(settings: Settings, model: Model) -> tuple[object, ...]:
    return (
        settings.cache_type_k,
        settings.cache_type_v,
        settings.flash_attn,
        settings.repack,
        settings.gpu_layers,
        *(settings.n_cpu_moe, settings.cpu_moe, settings.override_tensor),
        *([repr(model.split)] if model.split != ALL_CARDS else []),
        *model.altered,
    )


def _spread(model: Model, context: Context) -> tuple[object, ...]:
    """Return a value that depends on which layers each of several devices has. The value is empty for a single device.

    Without --tensor-split, the free memory at each start decides which layers are on which device. The layers of a device
    follow one another, so the bytes of their weights identify them. If the bytes cannot be counted, the value is random, so
    that no other start uses the KV of this start.
    """
    if len(model.devices) < 2:
        return ()
    try:
        return tuple((use.device, use.weights) for use in breakdown(context.handle))
    except NotCounted:
        return () if model.split.shares else (os.urandom(16),)


# ---- From settings and a file to a service: the model, the context, the cache with its tiers, the engine. ----------------

logger = logging.getLogger("slotcache")


def load_all(settings: Settings, path: Path, progress: LoadProgress | None = None) -> Loaded:
    """Load the served model and the models for vectors and scores, and open the documents.

    Raises ModelError, FolderError and SettingsError.

    path: the file of the served model.
    progress: see `Model`.
    """
    settings, model, decision = _open(settings, path, progress)
    with ExitStack() as made:  # frees everything if a later step fails, like `_service_of`
        made.callback(model.close)
        check_read_ahead(settings, model)
        service = None
        if model.can_chat:
            made.pop_all()
            service = _service_of(settings, model, decision, progress)
            made.callback(service.close)
        loaded = _with_search(settings, model, service, path)
        for tier in service.tiers if service else ():
            tier.wait()
        made.pop_all()
    return loaded


def _with_search(settings: Settings, model: Model, service: Service | None, path: Path) -> Loaded:
    """Load the models beside the served model, and open the documents."""
    name = settings.names(path)[0]

    def is_busy() -> bool:
        return service is not None and bool(service.open)

    vectors = load_vectors(settings, model, name, is_busy)
    if service is None:
        vectors.beside.append(model)  # without a service, `vectors` closes the model
    folder_index = load_folder_index(settings, vectors, is_busy)
    if service is not None and folder_index is not None and settings.read_ahead:
        prefix = SharedPrefix.first(Scope.shared(folder_index.scope, service.submitter.adapters.name()))
        most = min(settings.read_ahead, settings.cache_disk) if settings.cache_dir else settings.read_ahead
        most_tokens = (most << 20) // max(token_bytes(settings, model), 1)
        view = service.view
        folder_index.prefixes = LikelyPrefixes(
            folder_index.index, service.builder, prefix, most_tokens, state_tokens=lambda: view.state_tokens
        )
        service.idle.prefixes = folder_index.prefixes
    return Loaded(service, vectors, folder_index)


@cache
def _log_unused() -> None:
    """Log once in a process why a GPU or its backend is not used."""
    if line := unused_card():
        logger.warning("%s", line)
        return
    for name, reason in unloaded_backends().items():
        logger.warning("%s is not loaded: %s", name, reason)


def load(settings: Settings, path: Path, progress: LoadProgress | None = None) -> Service:
    """Load a model and make its service. The engine is not started. Raises ModelError, FolderError and SettingsError."""
    return _service_of(*_open(settings, path, progress), progress)


def _open(settings: Settings, path: Path, progress: LoadProgress | None = None) -> tuple[Settings, Model, Decision | None]:
    """Return the settings that fit into memory, the model loaded with them, and the decision about the fit."""
    return_large_blocks()
    gate.check()
    if settings.gpu_layers == ALL_LAYERS and not settings.device:  # neither flag is given
        hide_slower_card(path, settings.threads or fast_cores())
    gate.exclude_failing_card(card_flag(settings), lambda: progress is None or progress(0.0, "trying the card"))
    _log_unused()
    index = settings.docs_db if settings.docs else ""
    folders = {"--cache-dir": settings.cache_dir, "--slot-save-path": settings.slot_save_path, "--docs-db": index}
    for flag, folder in folders.items():
        if folder:
            own_folder(Path(folder).expanduser(), flag)
    settings, decision = fit(with_layout(settings, path, progress), path)
    for line in decision.lines() if decision else ():
        logger.info("%s", line)
    model = open_model(settings, path, progress)
    for line in model.without_effect():
        logger.warning("%s", line)
    if not model.can_chat and not (settings.embeddings or settings.reranking):
        about = model.description
        model.close()
        raise ModelError(
            f"{path} is not a text generation model: {about}; serve an encoder alone with --embeddings or --reranking, "
            "or beside a text generation model with --embedding-model or --rerank-model"
        )
    return settings, model, decision


def _service_of(settings: Settings, model: Model, decision: Decision | None, progress: LoadProgress | None) -> Service:
    """Make the service of a model.

    If this fails, all parts made so far are freed, because the next attempt to load a model needs their memory and folders.
    """
    with ExitStack() as made:
        made.callback(model.close)
        service = _serve(settings, model, decision, made, lambda doing: progress is None or progress(0.0, doing))
        made.pop_all()
        return service


def _serve(settings: Settings, model: Model, decision: Decision | None, made: ExitStack, goes_on: MayGoOn) -> Service:
    """Make the parts of a service, and the service.

    made: the callbacks that free the parts made so far. Each new part adds a callback that frees this part.
    goes_on: see `learn_costs`.
    """
    template = open_template(settings, model)
    files = adapter_files(settings)
    scales = [0.0 if settings.lora_init_without_apply else scale for _, scale in files]
    adapters = Adapters(model, [path for path, _ in files], scales)
    context = Context(model, context_settings(settings, model))
    made.callback(context.close)
    limit = _longest(settings, context)
    learn_costs(context, goes_on)
    if context.times and context.times.step > SLOW:
        logger.warning("%s takes %.1f s a token here: a smaller model is faster", model.path.name, context.times.step)
    runner = Runner(context, adapters)
    tree, snapshots = _cache(settings, model, context, runner)
    if (draft_model := _draft_model(settings, context, runner, goes_on)) is not None:
        made.callback(draft_model.close)
    elif model.num_heads:
        _log_unused_head(model)
    scheduler = _scheduler(settings, model, context, tree, snapshots=snapshots, draft_model=draft_model)
    made_by = _provenance(settings, model, context)
    tiers = lower_tiers(settings, made_by, lambda: origin_of(settings, model, context))
    for tier in tiers:
        made.callback(tier.close)
    engine = Engine(
        scheduler,
        runner,
        model.is_end,
        checks=settings.check,
        lower=tiers,
        sleep_after=settings.sleep_after,
        hang_after=settings.hang_after,
        draft_model=draft_model,
    )
    view = View(engine, tiers, token_bytes=token_bytes(settings, model), made_by=made_by)
    if (files := _conversation_files(settings, model, made_by)) is not None:
        made.callback(files.close)
    answers, sessions, room = AnswerMemory(), Sessions(files), LARGEST * settings.max_body << 20
    builder = PromptBuilder(model, template, answers, settings, sessions=sessions, limit=limit, room=room)
    made.callback(builder.close)
    parts = parts_of(context)
    logger.info("%s", describe(context, settings, parts))
    logger.info("%s", describe_template(settings, model, template))
    bounds = (settings.conversations, settings.conversation_ram << 20, settings.conversation_ttl)
    running: dict[Generation, PendingTurn | None] = {}
    conversations = Conversations(*bounds, files=files, turns=running.values)
    conversations.restore(HistoryVocabulary(model.num_vocab, builder.tokens))
    defaults = Defaults.of(settings, model, _recommended(model))
    submitter = Submitter(model, view, limit, defaults, adapters=adapters)
    ahead = Ahead(engine, view, builder, submitter)
    next_turns, num_sets = settings.idle_prefill, settings.idle_sets
    idle = IdlePrefill(ahead, sessions, open=running, next_turns=next_turns, num_sets=num_sets)
    grammars = Grammars(model)
    made.callback(grammars.close)  # called before `model.close`, since the thread of grammars reads the vocabulary
    service = Service(
        settings=settings,
        name=settings.names(model.path)[0],
        build=build_info(),
        fingerprint=fingerprint_of(settings, model, template.source),
        model=model,
        context=context,
        parts=parts,
        decision=decision,
        grammars=grammars,
        engine=engine,
        view=view,
        builder=builder,
        template=template,
        metrics=Metrics(conversations, running, idle, parts, context.times),
        submitter=submitter,
        open=running,
        answers=answers,
        conversations=conversations,
        idle=idle,
        sessions=sessions,
        tiers=tiers,
    )
    engine.background.max_generations = service.max_open
    return service


def _cache(settings: Settings, model: Model, context: Context, runner: Runner) -> tuple[PrefixTree, Snapshots | None]:
    """Make the prefix tree with its host memory.

    If the model's KV cannot be cut at a prefix and there is host memory, also make snapshots.
    """
    policy, sizes = settings.eviction, CopySizes(run_token=max(token_bytes(settings, model), 1))
    host_bytes = _host_bytes(settings)
    lent = 0 if model.device else _lent_bytes(context.num_cells * sizes.run_token, host_bytes)
    host = HostMemory(host_bytes, EvictionPolicy(policy), sizes=sizes, cut=runner.states.cut, lent=lent)
    of_runs = host if model.can_trim else HostMemory()
    tree = PrefixTree(context.num_cells, context.scratch, of_runs, EvictionPolicy(policy), costs=context.costs)
    return tree, Snapshots(tree, host) if host is not of_runs and host.max_bytes else None


def _scheduler(
    settings: Settings,
    model: Model,
    context: Context,
    tree: PrefixTree,
    *,
    snapshots: Snapshots | None,
    draft_model: DraftModel | None,
) -> Scheduler:
    """Make the scheduler, with this server's ways to reuse KV and its sources of drafts."""
    max_stall = settings.max_stall / 1000 or math.inf
    rows = min(context.max_rows, context.batch, settings.ubatch_size)  # the most drafted tokens that one kernel computes
    return Scheduler(
        tree,
        num_slots=settings.parallel,
        similarity=settings.slot_prompt_similarity,
        batch_size=context.batch,
        prefill_budget=settings.prefill_budget,
        max_stall=max_stall,
        idle_cells=settings.idle_cells,
        window=settings.window,
        index=snapshots,
        strategies=(SeparateDocuments, *([snapshots.strategy] if snapshots else [])),
        drafts=Drafts(
            context.costs,
            max_rows=rows,
            max_stall=max_stall,
            longest=context.rollback,
            ends=model.ends,
            drafter=draft_model,
        ),
        max_rows=context.max_rows,
    )


def _longest(settings: Settings, context: Context) -> int:
    """Return the most tokens of a request. Raises ModelError if --parallel exceeds the slots that the model can have."""
    if settings.parallel > (most := (context.scratch - 1) // 2):
        raise ModelError(f"--parallel {settings.parallel}: at most {most} slots with this model")
    most = context.num_cells if settings.kv_unified else max(context.num_cells // settings.parallel, 1)
    return min(most, context.model.context_train or most)


SPEC_TYPES = (  # the values that llama-server accepts for --spec-type
    *("none", "draft-mtp", "draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark"),
    *("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"),
)


def _draft_model(settings: Settings, served: Context, runner: Runner, goes_on: MayGoOn) -> DraftModel | None:
    """Load the draft model. Return None if the settings name no draft model, or if the served model cannot use drafts.

    Raises ModelError and SettingsError.
    """
    for kind in listed(settings.spec_type):
        if kind not in SPEC_TYPES:
            raise SettingsError(f"--spec-type {kind}: expected one of {', '.join(SPEC_TYPES)}")
        if kind not in ("none", "draft-mtp"):
            logger.warning("--spec-type %s has no effect: use --draft lookup or --draft-model", kind)
    if settings.draft_model and settings.uses_head:
        raise SettingsError("--draft-model and --spec-type draft-mtp: give one of them")
    if not (settings.draft_model or settings.uses_head):
        if settings.draft == "model":
            raise SettingsError("--draft model needs --draft-model FILE or --spec-type draft-mtp")
        return None
    if not served.rollback:
        logger.warning("--%s has no effect: %s", "draft-model" if settings.draft_model else "spec-type", CANNOT_DRAFT)
        return None
    if settings.uses_head:
        if why := why_unused(served.model):
            raise ModelError(f"--spec-type draft-mtp: the multi-token head of {served.model.path} cannot draft: {why}")
        logger.info("drafts come from the multi-token head of %s", served.model.path.name)
        return open_head(runner, served.settings, num_slots=settings.parallel)
    path = Path(settings.draft_model).expanduser()
    model = open_beside(settings, settings.draft_model)
    shape = replace(context_settings(settings, served.model), num_cells=served.num_cells)
    draft = open_draft_model(
        model,
        shape,
        served.model,
        num_slots=settings.parallel,
        beside=runner.interrupt,
        unit=served.unit,
        goes_on=goes_on,
    )
    bytes_of_token = model.kv_bytes("f16", "f16")
    logger.info("draft model %s: %s, KV %s bytes a token", path.name, model.description, f"{bytes_of_token:,}")
    return draft


def _recommended(model: Model) -> dict[str, Any]:
    """Return the sampling settings that the model's file recommends, and log them."""
    of_file = recommended(model.metadata)
    if of_file:
        shown = {**of_file, "samplers": ";".join(of_file["samplers"])} if "samplers" in of_file else of_file
        logger.info("the model's file recommends %s", ", ".join(f"{name} {value}" for name, value in shown.items()))
    return of_file


def _log_unused_head(model: Model) -> None:
    why = why_unused(model) or "--spec-type draft-mtp would use it"
    logger.info("the multi-token head of %s is not used: %s", model.path.name, why)


def describe(context: Context, settings: Settings, parts: Sequence[DevicePart]) -> str:
    """Describe the loaded model in one line: its size, the devices of its layers, its bytes of KV a token, and the slots."""
    model, per_token = context.model, token_bytes(settings, context.model)
    return (
        f"{model.path.name}: {model.description}, {mib(model.size)}, {described_place(parts)}; KV "
        f"{per_token:,} bytes a token, {context.num_cells:,} cells ({mib(context.num_cells * per_token)}), "
        f"{settings.parallel} slots"
    )


def described_place(parts: Sequence[DevicePart]) -> str:
    """Describe how many layers and bytes of weights are on each GPU.

    The layers alone do not say where the weights are, because an override may put a tensor on another device than its layer.
    """
    total, shown = sum(part.layers or 0 for part in parts), list[str]()
    for part in parts:
        if part.device.is_gpu and (part.layers != 0 or (part.use and part.use.weights)):
            layers = f"{part.layers} of {total} layers" if part.layers is not None else "layers"
            shown.append(f"{layers} on {part.device}" + (f" with {mib(part.use.weights)} of weights" if part.use else ""))
    return ", ".join(shown) or "all layers on the CPU"


def _named_or_jinja(template: str) -> str:
    """Return the source of a template that is given by name or as Jinja. Raises SettingsError for an unknown name."""
    source = named_template(template) or template
    if source == template and not re.search(r"[\s{]", template):
        raise SettingsError(f"--chat-template {template}: expected Jinja or one of {', '.join(names())}")
    return source


def adapter_files(settings: Settings) -> list[tuple[Path, float]]:
    """Return the files of --lora, then the files of --lora-scaled, each with its scale. Raises ModelError."""
    found = [(Path(file).expanduser(), 1.0) for file in filter(None, settings.lora.split(","))]
    for entry in filter(None, settings.lora_scaled.split(",")):
        file, _, scale = entry.rpartition(":")
        try:
            found.append((Path(file).expanduser(), convert(float(scale), Scale)))
        except ValueError:  # also msgspec's errors
            raise ModelError(f"--lora-scaled {entry}: expected FILE:SCALE, {-MOST_SCALE:g} to {MOST_SCALE:g}") from None
    return found


def open_template(settings: Settings, model: Model) -> ChatTemplate:
    """Return the chat template that the server uses. Raises ModelError and SettingsError."""
    try:
        return ChatTemplate(_template_source(settings, model), model.bos, model.eos, model.tokenizer.controls, give_way)
    except TemplateError as error:
        raise ModelError(f"the chat template cannot be used: {error}") from None


def describe_template(settings: Settings, model: Model, template: ChatTemplate) -> str:
    """Describe a chat template in one line: its source, its length and its digest."""
    given = "the model's file" if model.chat_template else "slotcache, since the model's file has none"
    given = "--chat-template" if settings.chat_template else given
    given = "--chat-template-file" if settings.chat_template_file else given
    return f"chat template of {given}: {len(template.source):,} characters, sha256 {template.digest}"


def _template_source(settings: Settings, model: Model) -> str:
    if settings.chat_template and settings.chat_template_file:
        raise SettingsError("--chat-template and --chat-template-file: give one of them")
    if settings.chat_template:
        return _named_or_jinja(settings.chat_template)
    if not settings.chat_template_file:
        return model.chat_template or DEFAULT_TEMPLATE
    try:
        return Path(settings.chat_template_file).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"cannot read the chat template {settings.chat_template_file}: {reason}") from None


def token_bytes(settings: Settings, model: Model) -> int:
    """Return the bytes of one token's KV."""
    return model.kv_bytes(settings.cache_type_k, settings.cache_type_v)


def _lent_bytes(pool: int, host_bytes: int) -> int:
    """Return how many bytes of host memory a step may borrow for the KV of other requests: the size of the pool, or 0.

    The result is 0 if the pool is larger than half of the memory that remains free when the host tier is full.

    pool: the bytes of all cells.
    """
    return pool if pool <= (free_memory() - host_bytes) // 2 else 0


def _host_bytes(settings: Settings) -> int:
    """Return the size of the host tier: --cache-ram, but at most half of the memory that is free now."""
    wanted, most = settings.cache_ram << 20, free_memory() // 2
    if wanted > most:
        logger.info("--cache-ram %s MiB is more than half of the free memory: using %s MiB", settings.cache_ram, most >> 20)
    return min(wanted, most)


def _provenance(settings: Settings, model: Model, context: Context) -> Provenance | None:
    """Return the provenance of stored KV, or None if this server stores no KV.

    The first call reads the whole file of the model.
    """
    return provenance_of(settings, model, context) if settings.cache_dir or settings.slot_save_path else None


def lower_tiers(settings: Settings, made_by: Provenance | None, origin_of: Callable[[], Origin]) -> list[LowerTier]:
    """Make the tiers of the cache below host memory.

    If KV was imported into the common scope, new KV of the common scope is stored in the same place, because new KV may
    continue imported KV.

    made_by: the provenance of the tiers' records.
    origin_of: returns the origin of the records in words.
    """
    if not settings.cache_dir or made_by is None:
        return []
    root, max_bytes, origin = Path(settings.cache_dir).expanduser(), settings.cache_disk << 20, origin_of()
    imported = of_any_machine(made_by.model, origin.shape)
    has_imported = (root / imported.folder).is_dir()
    tiers: list[LowerTier] = [tier := DiskTier(root, max_bytes, made_by, without={COMMON} if has_imported else ())]
    with ExitStack() as made:  # closes the tier if a later step fails
        made.callback(tier.close)
        write_origin(tier.folder, origin)
        tiers += [ImportedTier(root, max_bytes, imported)] if has_imported else []
        made.pop_all()
    return tiers


def _conversation_files(settings: Settings, model: Model, made_by: Provenance | None) -> ConversationFiles | None:
    """Open a folder for stored conversations. Return None if this server stores no conversations.

    Each model has its own folder, because the tokens of models may differ. A model whose metadata is overridden has another
    folder, because its tokens may differ, too.
    """
    if not settings.cache_dir or made_by is None:
        return None
    name = "-".join(
        ["conversations", made_by.model[:16], *([_digest(given)[:8]] if (given := model.metadata_overrides) else [])]
    )
    return free_conversation_files(Path(settings.cache_dir).expanduser() / name)
