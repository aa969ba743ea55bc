"""Makes a service from settings and a file: the model, the context, the cache with its tiers, the engine."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec import convert

from ..models.adapters import Adapters
from ..models.chat.named import DEFAULT_TEMPLATE, named_template, names
from ..models.chat.sandbox import TemplateError
from ..models.chat.template import ChatTemplate
from ..models.context import Context
from ..models.errors import ModelError
from ..models.grammar.grammars import Grammars
from ..models.hardware.device import devices
from ..models.hardware.memory import free_memory
from ..models.hardware.timing import learn_costs
from ..models.memory.heap import return_large_blocks
from ..models.model import Model
from ..models.runner import Runner
from ..models.samplers.recommended import recommended
from ..slots.drafts.drafts import Drafts
from ..slots.eviction import EvictionPolicy
from ..slots.hybrids.snapshots import Snapshots
from ..slots.scheduler import Scheduler
from ..slots.scope import Scope
from ..slots.tiers.disk import DiskTier
from ..slots.tiers.folder import own_folder
from ..slots.tiers.host import HostTier
from ..slots.tiers.provenance import Provenance
from ..slots.tiers.tier import LowerTier
from ..slots.tree import PrefixTree
from .chat.builder import PromptBuilder
from .chat.conversations import Conversations
from .chat.shelf import Shelf
from .chat.stored import Vocabulary
from .chat.tokens import AnswerMemory
from .chat.turn import Turn
from .edge.bodies import LARGEST
from .engine.adapters import Lora
from .engine.door import Door
from .engine.engine import Engine
from .engine.view import Generation, View
from .fitting.context import context_settings
from .fitting.decision import Decision
from .fitting.fit import fit
from .fitting.layout import with_layout
from .fitting.measure import open_model
from .flags.setting import SettingsError
from .idle import IdlePrefill
from .intake import Intake
from .metrics import Metrics
from .provenance import build_info, fingerprint_of, provenance_of
from .retrieving.beginnings import Beginnings, Front
from .retrieving.library import Library
from .retrieving.loading import check_read_ahead, load_library
from .service import Service
from .settings import Settings
from .vectors.loading import load_vectors
from .vectors.vectors import Vectors
from .wire.adapters import MOST_SCALE, Scale
from .wire.defaults import Defaults

logger = logging.getLogger("slotcache")


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything that serves requests.

    service: None for an encoder, which generates no text. library: None without --docs.
    """

    service: Service | None
    vectors: Vectors
    library: Library | None


def load_all(settings: Settings, path: Path, progress: Callable[[float], bool] | None = None) -> Loaded:
    """Load the served model and those beside it, and open the documents. progress: as in `Model`.

    Raises ModelError, FolderError and SettingsError.
    """
    settings, model, decision = _open(settings, path, progress)
    check_read_ahead(settings, model)
    service = _serve(settings, model, decision) if model.can_chat else None
    name = settings.names(path)[0]

    def is_busy() -> bool:
        return service is not None and bool(service.open)

    vectors = load_vectors(settings, model, name, is_busy)
    if service is None:
        vectors.beside.append(model)  # no service closes it
    limit = service.intake.limit if service else 0
    library = load_library(settings, vectors, limit, is_busy)
    if service is not None and library is not None and settings.read_ahead:
        front = Front.first(Scope.shared(library.scope, service.intake.lora.name(None)))
        most_tokens = (settings.read_ahead << 20) // max(token_bytes(settings, model), 1)
        view = service.view
        library.beginnings = Beginnings(
            library.index, service.builder, front, most_tokens, state_tokens=lambda: view.state_tokens
        )
        service.idle.beginnings = library.beginnings
    return Loaded(service, vectors, library)


def load(settings: Settings, path: Path, progress: Callable[[float], bool] | None = None) -> Service:
    """Load a model and make everything around it, the engine not yet started. Raises ModelError and FolderError."""
    return _serve(*_open(settings, path, progress))


def _open(
    settings: Settings, path: Path, progress: Callable[[float], bool] | None = None
) -> tuple[Settings, Model, Decision | None]:
    """Return the settings that fit, the model loaded with them, and why they fit."""
    return_large_blocks()
    for folder, flag in ((settings.cache_dir, "--cache-dir"), (settings.slot_save_path, "--slot-save-path")):
        if folder:
            own_folder(Path(folder).expanduser(), flag)
    settings, decision = fit(with_layout(settings, path, progress), path)
    for line in decision.lines() if decision else ():
        logger.info("%s", line)
    model = open_model(settings, path, progress)
    if not model.can_chat and not (settings.embeddings or settings.reranking):
        raise ModelError(
            f"{path} is not a text generation model: {model.description}; serve an encoder with --embeddings or "
            "--reranking, or beside a text generation model with --embedding-model or --rerank-model"
        )
    return settings, model, decision


def _serve(settings: Settings, model: Model, decision: Decision | None) -> Service:
    source = _template_source(settings, model)
    try:
        template = ChatTemplate(source, model.bos, model.eos, model.tokenizer.controls)
    except TemplateError as error:
        raise ModelError(f"the chat template cannot be used: {error}") from None
    files = adapter_files(settings)
    adapters = Adapters(model, [path for path, _ in files])
    context = Context(model, context_settings(settings, model))
    if settings.parallel > (most := (context.scratch - 1) // 2):
        raise ModelError(f"--parallel {settings.parallel}: at most {most} lanes with this model")
    most = context.num_cells if settings.kv_unified else max(context.num_cells // settings.parallel, 1)
    limit = min(most, model.context_train or most)
    learn_costs(context)
    runner = Runner(context, adapters)
    host_bytes = _host_bytes(settings)
    host = HostTier(host_bytes // max(token_bytes(settings, model), 1), EvictionPolicy(settings.eviction))
    tree = PrefixTree(context.num_cells, context.scratch, host, EvictionPolicy(settings.eviction), costs=context.costs)
    max_stall = settings.max_stall / 1000 or math.inf
    scheduler = Scheduler(
        tree,
        num_lanes=settings.parallel,
        batch_size=context.batch,
        prefill_budget=settings.prefill_budget,
        max_stall=max_stall,
        idle_cells=settings.idle_cells,
        window=settings.window,
        snapshots=Snapshots(
            tree, 0 if model.can_trim else host_bytes, policy=EvictionPolicy(settings.eviction), cut=runner.states.cut
        ),
        drafts=Drafts(context.costs, max_rows=min(context.max_rows, context.batch), max_stall=max_stall, ends=model.ends),
    )
    answers = AnswerMemory()
    made_by = _provenance(settings, model, context)
    tiers = lower_tiers(settings, made_by)
    engine = Engine(scheduler, runner, model.is_end, checks=settings.check, lower=tiers, sleep_after=settings.sleep_after)
    door, view = Door(engine, model), View(engine, tiers, token_bytes=token_bytes(settings, model), made_by=made_by)
    builder = PromptBuilder(model, template, answers, settings, limit=limit, room=LARGEST * settings.max_body << 20)
    logger.info("%s", describe(model, context, settings))
    bounds = (settings.conversations, settings.conversation_ram << 20, settings.conversation_ttl)
    running: dict[Generation, Turn | None] = {}
    conversations = Conversations(*bounds, shelf=_shelf(settings, made_by), turns=running.values)
    conversations.restore(Vocabulary(model.num_vocab, builder.tokens))
    scales = [0.0 if settings.lora_init_without_apply else scale for _, scale in files]
    of_file = recommended(model.metadata)
    if of_file:
        shown = {**of_file, "samplers": ";".join(of_file["samplers"])} if "samplers" in of_file else of_file
        logger.info("the file recommends %s", ", ".join(f"{name} {value}" for name, value in shown.items()))
    defaults = Defaults.of(settings, model, of_file)
    intake = Intake(model, view, limit, defaults, lora=Lora(adapters, scales))
    idle = IdlePrefill(
        door, view, builder, intake, open=running, next_turns=settings.idle_prefill, num_sets=settings.idle_sets
    )
    metrics = Metrics(conversations, running, idle)
    service = Service(
        settings=settings,
        name=settings.names(model.path)[0],
        build=build_info(),
        fingerprint=fingerprint_of(settings, model, source),
        model=model,
        context=context,
        decision=decision,
        grammars=Grammars(model),
        engine=engine,
        door=door,
        view=view,
        builder=builder,
        template=template,
        metrics=metrics,
        intake=intake,
        open=running,
        answers=answers,
        conversations=conversations,
        idle=idle,
        tiers=tiers,
    )
    engine.background.max_generations = service.max_open
    return service


def describe(model: Model, context: Context, settings: Settings) -> str:
    """Describe the loaded model in one line: its size, the place of its layers, and the bytes of KV a token."""
    gpu = next((device for device in devices() if device.is_gpu), None)
    on_gpu = model.num_layers + 1 if settings.gpu_layers < 0 else min(settings.gpu_layers, model.num_layers + 1)
    where = f"{on_gpu} of {model.num_layers + 1} layers on {gpu.description}" if gpu else "all layers on the CPU"
    per_token = token_bytes(settings, model)
    return (
        f"{model.path.name}: {model.description}, {model.size / 2**20:,.0f} MiB, {where}; KV {per_token:,} bytes a token, "
        f"{context.num_cells:,} cells ({context.num_cells * per_token / 2**20:,.0f} MiB), {settings.parallel} lanes"
    )


def _named_or_jinja(template: str) -> str:
    """Return the source of a named template, or Jinja as it is: a word alone is a name. Raises SettingsError."""
    source = named_template(template) or template
    if source == template and not re.search(r"[\s{]", template):
        raise SettingsError(f"--chat-template {template}: expected Jinja or one of {', '.join(names())}")
    return source


def adapter_files(settings: Settings) -> list[tuple[Path, float]]:
    """Return the files of --lora, then those of --lora-scaled, each with its scale. Raises ModelError."""
    found = [(Path(file).expanduser(), 1.0) for file in filter(None, settings.lora.split(","))]
    for entry in filter(None, settings.lora_scaled.split(",")):
        file, _, scale = entry.rpartition(":")
        try:
            found.append((Path(file).expanduser(), convert(float(scale), Scale)))
        except ValueError:  # msgspec's errors are such, too
            raise ModelError(f"--lora-scaled {entry}: expected FILE:SCALE, {-MOST_SCALE:g} to {MOST_SCALE:g}") from None
    return found


def _template_source(settings: Settings, model: Model) -> str:
    if settings.chat_template and settings.chat_template_file:
        raise SettingsError("--chat-template and --chat-template-file: give one of them")
    if settings.chat_template:
        return _named_or_jinja(settings.chat_template)
    if not settings.chat_template_file:
        return model.chat_template or DEFAULT_TEMPLATE
    try:
        return Path(settings.chat_template_file).read_text("utf-8")
    except OSError as error:
        raise ModelError(f"cannot read the chat template {settings.chat_template_file}: {error.strerror}") from None


def token_bytes(settings: Settings, model: Model) -> int:
    """Return the bytes of one token's KV."""
    return model.kv_bytes(settings.cache_type_k, settings.cache_type_v)


def _host_bytes(settings: Settings) -> int:
    """Return the size of the host tier: --cache-ram, but at most half of the memory that is free now."""
    wanted, most = settings.cache_ram << 20, free_memory() // 2
    if wanted > most:
        logger.info("--cache-ram %s MiB is more than half of the free memory: %s MiB it is", settings.cache_ram, most >> 20)
    return min(wanted, most)


def _provenance(settings: Settings, model: Model, context: Context) -> Provenance | None:
    """The provenance of what this server saves, if it may save anything. Reads the whole model the first time."""
    return provenance_of(settings, model, context) if settings.cache_dir or settings.slot_save_path else None


def lower_tiers(settings: Settings, made_by: Provenance | None) -> list[LowerTier]:
    """Make the tiers below host memory. made_by: the provenance of their records."""
    if not settings.cache_dir or made_by is None:
        return []
    return [DiskTier(Path(settings.cache_dir).expanduser(), settings.cache_disk << 20, made_by)]


def _shelf(settings: Settings, made_by: Provenance | None) -> Shelf | None:
    """Make the folder of stored conversations, one for each model: the tokens in them are the model's."""
    if not settings.cache_dir or made_by is None:
        return None
    return Shelf(Path(settings.cache_dir).expanduser() / f"conversations-{made_by.model[:16]}")
