"""Ollama's routes that list and show models, and the forms in which Ollama's clients name a model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...models.jinja import TemplateError
from ...models.model import InfillTokens, Model
from ...models.model_files import Stamp
from ...models.template import ChatTemplate
from ..config.settings import VERSION
from ..engine.fit import whole_cells
from ..engine.usage import Fields
from ..http.api_errors import RequestError, no_route, unknown_model
from ..search.vectors import Vectors
from ..service.models import ModelEntry
from ..service.service import Service
from .endpoint import models_of
from .reply import JsonReply, encode

API_VERSION = "0.13.5"  # the version of Ollama that has these fields; clients compare it
NDJSON = "application/x-ndjson"
FOR_EVER = 100 * 365 * 86400.0  # seconds, in answers about a model that is never unloaded


class ModelName(Struct, frozen=True, kw_only=True):
    """`POST /api/show` and `/api/pull`.

    model, name: the name of a model, in one of the two fields. All fields except `model` and `name` have no effect.
    """

    model: str = ""
    name: str = ""
    verbose: bool | None = None
    insecure: bool | None = None
    stream: bool | None = None


def written(time: datetime | None = None) -> str:
    """Return a time in Ollama's form. time: None stands for the present time."""
    return (time or datetime.now(UTC)).isoformat().replace("+00:00", "Z")


HERE = "this server gets its models from the command line: slotcache serve -m FILE, --models-dir DIR or -hf USER/REPO"


def tagged(name: str) -> str:
    """Return a model's name with its tag, as Ollama lists models. A name without a tag gets the tag `latest`."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _known(request: Request) -> dict[str, Model]:
    """Return the loaded models that generate text or make vectors, by name. A model with aliases has several names."""
    known: dict[str, Model] = {}
    for _, vectors in _opened(request):
        for name, model in vectors.models().items():
            if _capabilities(request, model):
                names = vectors.settings.names(model.path) if name == vectors.name else (name,)
                known |= {tagged(each): model for each in names}
    return known


def _opened(request: Request) -> list[tuple[Service | None, Vectors]]:
    """Return the service and the vectors of each loaded model. Raises RequestError 503 while the first model loads."""
    return [(loaded.service, loaded.vectors) for loaded in models_of(request).opened()]


def _never_loaded(request: Request) -> list[ModelEntry]:
    """Return the models that have not been loaded yet, if several models share the device."""
    return [entry for entry in request.app.state.app.models.entries.values() if entry.loaded is None]


def _find(request: Request, name: str | None, usual: Model) -> Model:
    """Return the model of this name. Raises RequestError. usual: the result for an unknown name under --any-model."""
    if not name:
        raise RequestError("model is required", param="model")
    known = _known(request)
    if (model := known.get(tagged(name))) is not None:
        return model
    if _unread(request, name) is not None:
        message = f"{name!r} is not loaded yet: a request for it, or POST /models/load, loads it"
        raise RequestError(message, status=503, param="model", code="model_not_loaded")
    if request.app.state.app.settings.any_model:
        return usual
    raise unknown_model(name, [*known, *(tagged(entry.name) for entry in _never_loaded(request))])


def _unread(request: Request, name: str) -> ModelEntry | None:
    """Return the model of this name if it has not been loaded yet."""
    return next((entry for entry in _never_loaded(request) if tagged(entry.name) == tagged(name)), None)


def check_model(request: Request, name: str | None, wanted: Model, act: str) -> str:
    """Return `name`. Raises RequestError if `name` names a model other than `wanted`.

    act: what the request does with the model (chat, generate or embed), for the error.
    """
    if _find(request, name, wanted) is not wanted:
        able = next(each for each, model in _known(request).items() if model is wanted)
        raise RequestError(f"{name!r} does not support {act} here: expected {able}", param="model")
    return str(name)


def _capabilities(request: Request, model: Model) -> list[str]:
    """Return what a model can do, in Ollama's words."""
    opened = _opened(request)
    embedders = [vectors.embedding.embedder.model for _, vectors in opened if vectors.embedding is not None]
    able = ["embedding"] if any(model is one for one in embedders) else []
    if (service := _service_with(request, model)) is not None:
        able += ["completion", "tools"]  # if the template shows no tools, the system message has them
        able += ["insert"] * service.builder.can_infill + ["thinking"] * service.template.thinks
    return able


def _service_with(request: Request, model: Model) -> Service | None:
    """Return the service of a model; None if the model generates no text."""
    return next((one for one, _ in _opened(request) if one is not None and model is one.model), None)


def _listed(name: str, model: Model) -> Fields:
    """Return a model as Ollama lists it. The digest covers the sizes and times of the model's files, not their contents."""
    stamps, family, count = sorted(model.weights.files.stamps.values()), _family(model), model.num_parameters
    level = re.sub(r" - ([SML])\w*$", r"_\1", model.file_type).removeprefix("all ")  # llama.cpp's `Q4_K - Medium`
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
    about: Fields = {"parent_model": "", "format": "gguf", "family": family, "families": [family]}
    listed: Fields = {"name": name, "model": name, "size": model.size}
    return listed | _dated(stamps) | {"details": about | {"parameter_size": size, "quantization_level": level}}


def _dated(stamps: Sequence[Stamp]) -> Fields:
    """Return the time of the last change of a model's files, and a digest of the files' sizes and times."""
    last = max((stamp[3] for stamp in stamps), default=0)
    changed = written(datetime.fromtimestamp(last / 1e9, UTC))
    return {"modified_at": changed, "digest": sha256(repr(stamps).encode()).hexdigest()}


def _family(model: Model) -> str:
    return model.metadata("general.architecture") or ""


OF_FILE = ("general.name", "general.basename", "general.size_label")
OF_ARCHITECTURE = ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv", "expert_count")


def _info(model: Model, context: int) -> Fields:
    """Return the metadata of a model's file. context: the most tokens that a request may have."""
    family = _family(model)
    given = {key: model.metadata(key) for key in (*OF_FILE, *(f"{family}.{key}" for key in OF_ARCHITECTURE))}
    found: Fields = {"general.architecture": family, "general.parameter_count": model.num_parameters}
    found[f"{family}.context_length"] = context
    return found | {key: int(text) if text.isdecimal() else text for key, text in given.items() if text is not None}


def _length(request: Request, model: Model) -> int:
    """Return the most tokens that a request to a model may have."""
    service = _service_with(request, model)
    return service.submitter.limit if service is not None else model.context_train


async def tags(request: Request) -> Response:
    """List the models in the form of Ollama's clients."""
    known = [_listed(name, model) for name, model in _known(request).items()]
    return JsonReply({"models": [*known, *[await _listed_unread(request, entry) for entry in _never_loaded(request)]]})


async def _listed_unread(request: Request, entry: ModelEntry) -> Fields:
    """Return a model that has not been loaded, as Ollama lists it.

    The model's details come from the metadata in its file. If the file cannot be read, the details are missing.
    """
    head = await request.app.state.app.models.look(entry, partial(_described_unread, entry))
    if not head.problem:
        return head.facts["listed"]
    stamps, name = sorted(head.stamps.values()), tagged(entry.name)
    return {"name": name, "model": name, "size": sum(one[2] for one in stamps), "details": {"format": "gguf"}} | _dated(
        stamps
    )


def _described_unread(entry: ModelEntry, model: Model) -> dict[str, Fields]:
    """Return a model that has not been loaded: in `listed` as Ollama lists models, in `shown` as Ollama shows one model.

    model: the model opened without its weights, for its metadata and vocabulary.
    """
    listed, settings = _listed(tagged(entry.name), model), entry.settings
    cells = whole_cells(settings.ctx_size)
    most = cells if settings.kv_unified else cells // settings.parallel
    trained = model.context_train
    source = model.chat_template or ""
    able = (
        ["completion", "tools"] + ["insert"] * (InfillTokens.of(model) is not None) + ["thinking"] * _thinks(source, model)
    )
    shown = _shown(model, listed) | {"template": source, "capabilities": able if model.can_chat else []}
    return {"listed": listed, "shown": shown | {"model_info": _info(model, min(most, trained) if most else trained)}}


def _thinks(source: str, model: Model) -> bool:
    try:
        return ChatTemplate(source, model.bos, model.eos).thinks
    except TemplateError:
        return False


async def show(request: Request, asked: ModelName) -> Response:
    """Show a model in the form of Ollama's clients."""
    name, state = asked.model or asked.name, request.app.state.app
    if (entry := _unread(request, name)) is not None:
        head = await state.models.look(entry, partial(_described_unread, entry))
        if head.problem:
            raise RequestError(f"{name!r} cannot be read: {head.problem}", status=503, param="model", code="model_failed")
        return JsonReply(head.facts["shown"])
    model = _find(request, name, state.loaded().model)
    service, body = _service_with(request, model), _shown(model, _listed(name, model))
    if service is not None:
        sampling = service.submitter.defaults.sampling
        names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n")
        values = {"num_ctx": service.submitter.limit} | {name: getattr(sampling, name) for name in names}
        lines = (f"{name:<30} {value}" for name, value in values.items())
        body |= {"parameters": "\n".join(lines), "template": service.template.source}
    more = {"model_info": _info(model, _length(request, model)), "capabilities": _capabilities(request, model)}
    return JsonReply(body | more)


def _shown(model: Model, listed: Fields) -> Fields:
    """Return a model as Ollama shows it, from the metadata of its file. listed: the model as Ollama lists it."""
    shown: Fields = {"license": model.metadata("general.license") or "", "modelfile": f"FROM {model.path.name}\n"}
    return shown | {field: listed[field] for field in ("details", "modified_at")}


async def ps(request: Request) -> Response:
    """List the models that are in memory, in the form of Ollama's clients."""
    opened = _opened(request)
    workers = (worker for _, vectors in opened for worker in vectors.workers)
    left = {id(worker.embedder.model): worker.seconds_left for worker in workers if not worker.is_asleep}
    for service, _ in opened:
        if service is not None and not service.engine.sleep.is_asleep:
            left[id(service.model)] = service.engine.sleep.seconds_left
    loaded = {name: model for name, model in _known(request).items() if id(model) in left}
    shown: list[Fields] = []
    for name, model in loaded.items():
        ends = datetime.now(UTC) + timedelta(seconds=min(left[id(model)], FOR_EVER))
        place = {"size_vram": model.size if model.device else 0, "context_length": _length(request, model)}
        shown.append(_listed(name, model) | place | {"expires_at": written(ends)})
    return JsonReply({"models": shown})


async def version(request: Request) -> Response:
    """Return the version of Ollama's API that this server follows, and the version of this server."""
    return JsonReply({"version": API_VERSION, "slotcache": VERSION})


async def pull(request: Request, asked: ModelName) -> Response:
    """Report success if the model is already served. If the model is not served, explain how this server gets models."""
    name = asked.model or asked.name
    try:
        if _unread(request, name) is None:
            _find(request, name, request.app.state.app.loaded().model)
    except RequestError as error:
        raise RequestError(f"{error.message}; {HERE}", status=error.status, param=error.param, code=error.code) from None
    return Response(encode({"status": "success"}) + b"\n", media_type=NDJSON)


async def refuse(request: Request) -> Response:
    """Refuse to change the models, and explain how this server gets models."""
    raise RequestError(f"this server makes, copies and deletes no models: {HERE}")


def asks_whether_it_runs(request: Request) -> bool:
    """Return whether a request for `/` comes from a client of Ollama, which accepts JSON, and not from a browser."""
    accepted = request.headers.get("accept", "")
    return "application/json" in accepted and "text/html" not in accepted


async def greet(request: Request) -> Response:
    """Tell Ollama's clients that the server runs. Any other client, such as a browser, gets status 404."""
    if not asks_whether_it_runs(request):
        raise no_route(request.scope["path"])
    return PlainTextResponse("Ollama is running")
