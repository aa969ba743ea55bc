"""llama-server's own routes: health, models, properties, slots, metrics, adapters."""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from time import perf_counter

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ...models.context import DevicePart
from ...models.hardware import unused_card
from ..chat.body import AdapterScales
from ..chat.decode import decode
from ..config.settings import listed
from ..engine.generation import Generation
from ..engine.usage import Fields
from ..engine.view import SlotState
from ..http.api_errors import RequestError, unknown_model
from ..http.bodies import Reservation
from ..http.json_body import MARK
from ..search.vectors import Vectors, about
from ..service.models import ModelEntry, Models
from ..service.service import Service
from ..service.submitter import with_scales
from .endpoint import loaded_of, models_of, read_body, service_of, vectors_of, while_connected
from .reply import JsonReply


async def adapters(request: Request) -> Response:
    """List the LoRA adapters with their default scales. A default scale applies to requests that set no scales."""
    adapters = service_of(request).submitter.adapters
    return JsonReply(
        [
            {"id": number, "path": str(path), "scale": adapters.usual[number], "task_name": "", "prompt_prefix": ""}
            for number, path in enumerate(adapters.paths)
        ]
    )


async def set_adapters(request: Request) -> Response:
    """Change the default scales of the LoRA adapters. Open requests keep their scales."""
    service, bodies = service_of(request), request.app.state.app.bodies
    with Reservation(bodies) as room:
        body = (await bodies.read(request, room)).removeprefix(MARK)
        given = b'{"adapters":%b}' % body if body.lstrip()[:1] == b"[" else body
        asked = await asyncio.to_thread(decode, given, AdapterScales)  # the body may be large
    with_scales(asked.adapters, "adapters", service.submitter.adapters.set_usual)
    return JsonReply({"success": True})


# ---- The models and the settings as llama-server shows them: `/props` and the list of models. ---------------------------


async def props(request: Request) -> Response:
    """Show llama-server's properties and every setting. For an encoder, show only what applies to encoders."""
    vectors, service = vectors_of(request), loaded_of(request).service
    shown = (_properties(service) if service else {}) | vectors.properties()
    shown |= {"ui_settings": {"sources": request.app.state.app.folder_index is not None}}
    return JsonReply(shown | {"is_sleeping": request.app.state.app.is_asleep})


def _properties(service: Service) -> Fields:
    settings, model = service.settings, service.model
    params = service.submitter.defaults.sampling.shown() | {"n_predict": service.submitter.defaults.limit}
    return {
        "default_generation_settings": {"params": params, "n_ctx": service.submitter.limit},
        "total_slots": settings.parallel,
        "model_ftype": model.file_type,
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": settings.slots,
        "endpoint_props": settings.props,
        "endpoint_metrics": settings.metrics,
        "ui": settings.ui,
        "chat_template": service.template.source,
        "chat_template_digest": f"sha256:{service.template.digest}",
        "chat_template_caps": service.template.capabilities,
        "bos_token": model.bos,
        "eos_token": model.eos,
        "memory": service.decision.shown() if service.decision else None,
        "device": _device(service),
        "build_info": service.build,
        "system_fingerprint": service.fingerprint,
        "cors_proxy_enabled": False,
        "draft": _drafts(service),
    }


COSTS = {"recompute_last": "rest"}  # costs that have another, older name in `/props`


def _device(service: Service) -> Fields:
    """Return the device that computes, with the times that were measured on it and its `Costs`.

    Without measured times, the field `times` is null. An infinite cost, which turns a rule off, is shown as null.
    """
    context, device = service.context, service.model.device
    costs = {COSTS.get(name, name): value if isfinite(value) else None for name, value in asdict(context.costs).items()}
    return {
        "name": device.name if device else "CPU",
        "description": device.description if device else "",
        "devices": [_part(part) for part in service.parts],
        "times": asdict(context.times) if context.times else None,
        "costs": costs,
        "unused": unused_card() or None,
    }


def _part(part: DevicePart) -> Fields:
    """Return a device's share of the model. A size that llama.cpp does not report is null."""
    uses = {name: getattr(part.use, name, None) for name in ("weights", "kv", "compute")}
    return {**asdict(part.device), "layers": part.layers, **uses}


def _drafts(service: Service) -> Fields:
    """Return how tokens are drafted for requests that do not set `draft`.

    If --draft asks for drafts and there can be none, the result has the reason.
    """
    why, wanted = service.submitter.why_no_drafts, service.settings.draft_mode
    model = service.engine.draft_model
    kind = "head" if model and model.context.settings.is_head else "model"
    of_model: Fields = {kind: model.context.model.path.name, "is_off": model.is_off} if model else {}
    if model and model.is_off:
        of_model["why"] = model.why_off
    return {"mode": "off", "why": why} if why and wanted != "off" else {"mode": wanted} | of_model


async def change_props(request: Request) -> Response:
    """Refuse to change properties. With --props, accept the request but change nothing, as llama-server does."""
    if not service_of(request).settings.props:
        raise RequestError("this server was started without --props", status=501)
    return JsonReply({"success": True})


async def models(request: Request) -> Response:
    """List the served models, the embedding model and the reranker. The list suits clients of OpenAI and of Ollama."""
    data = _all_models(request)
    return JsonReply({"models": [_as_ollama(str(entry["id"]), request) for entry in data], "object": "list", "data": data})


async def model(request: Request) -> Response:
    """Show the model that has this name or alias."""
    name, data = request.path_params["id"], _all_models(request)
    for entry in data:
        if name in (entry["id"], *entry["aliases"]):  # type: ignore[misc]
            return JsonReply(entry)
    if request.app.state.app.settings.any_model:
        return JsonReply(data[0] | {"id": name})
    raise unknown_model(name, (str(entry["id"]) for entry in data))


def _all_models(request: Request) -> list[Fields]:
    return [one for entry in models_of(request).entries.values() for one in _listing(request, entry)]


def _listing(request: Request, entry: ModelEntry) -> list[Fields]:
    """Return OpenAI's objects for a model, and for the embedding model and the reranker that run next to it.

    If several models are served, each object also has the fields with which llama-server's router reports a status.
    `n_ctx` is the most tokens that a request may have.
    """
    state, loaded = request.app.state.app, entry.loaded
    common: Fields = {"object": "model", "created": state.started, "owned_by": "slotcache"}
    status: Fields = {"path": str(entry.path), "status": entry.status()} if state.models.takes_turns else {}
    if loaded is None:
        return [{"id": entry.name, "aliases": (entry.name,), "tags": []} | common | status]
    vectors = loaded.vectors
    (name, model), *beside = vectors.models().items()
    about_served = about(model)
    names, tags = vectors.settings.names(vectors.model.path), sorted(listed(state.settings.tags))
    shown: Fields = {"id": name, "aliases": names, "tags": tags} | common | {"meta": about_served}
    if loaded.service is not None:
        limit = loaded.service.submitter.limit
        shown |= {"meta": about_served | {"n_ctx": limit}, "context_length": limit, "max_model_len": limit}
    others: list[Fields] = []
    for name, model in beside:
        other: Fields = {"id": name, "aliases": (name,), "tags": []} | common | {"meta": about(model)}
        others.append(other | (state.models.status_beside(name) if status else {}))
    return [shown | status, *others]


async def load_model(request: Request, asked: ModelAction) -> Response:
    """Load a model, even if its last load failed. The load waits until it is the model's turn on the device."""
    models = _several(request)
    entry = models.find(asked.model)
    models.retry(entry)
    loaded = await while_connected(request, models.ready(entry))
    if loaded.service is not None:
        loaded.service.engine.sleep.bring()
    return JsonReply({"success": True})


async def unload_model(request: Request, asked: ModelAction) -> Response:
    """Unload a model once its running requests are finished. The model's KV stays in host memory and on disk."""
    models = _several(request)
    worker = models.find_beside(asked.model)
    if worker is not None and worker.embedder.is_open:
        worker.keep(0)
    elif worker is None and (entry := models.find(asked.model)).value == "loaded":
        models.unload(entry)
    else:
        raise RequestError(f"{asked.model} is not loaded", param="model")
    return JsonReply({"success": True})


def _several(request: Request) -> Models:
    """Return the models that share the device. Raises RequestError if the server has only one model."""
    models = models_of(request)
    if not models.takes_turns:
        raise RequestError("this server has one model: give -m several times, or --models-dir")
    return models


def _as_ollama(name: str, request: Request) -> Fields:
    """Return a model as Ollama lists it. Only the names and the capabilities have values, since clients read these."""
    state = request.app.state.app
    vectors: Vectors = state.loaded()
    entry: ModelEntry | None = state.models.entries.get(name)
    able = {
        "completion": entry is not None and (entry.loaded is None or entry.loaded.service is not None),
        "embedding": vectors.embedding is not None and name == vectors.embedding.name,
        "rerank": vectors.reranking is not None and name == vectors.reranking.name,
    }
    details = {"parent_model": "", "format": "gguf", "family": "", "families": [""]}
    return {
        "name": name,
        "model": name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": [capability for capability, is_able in able.items() if is_able],
        "parameters": "",
        "details": details | {"parameter_size": "", "quantization_level": ""},
    }


# ---- Slots --------------------------------------------------------------------------------------------------------------
# llama-server's `POST /slots/{id}?action=save|restore|erase`: saves a slot's history to a file, restores it, or erases it.

ACTIONS = ("save", "restore", "erase")
MAX_NAME = 200  # bytes of a file's name: systems allow 255, and the name gets a suffix while the file is written


class ModelAction(Struct, frozen=True):
    """The body of `POST /models/load` and `/models/unload`."""

    model: str


class FileName(Struct):
    """The body of the actions `save` and `restore` on a slot."""

    filename: str


async def act(request: Request) -> Response:
    """Save, restore or erase the history of a slot, as `?action=` says."""
    service = service_of(request)
    number = _number(service, request.path_params["id"])
    action = request.query_params.get("action")
    if action not in ACTIONS:
        raise RequestError(f"action is {reprlib.repr(action)}: expected one of {', '.join(ACTIONS)}", param="action")
    service.idle.abort()  # idle prefill may be on this slot
    try:
        if action == "erase":
            return JsonReply({"id_slot": number, "n_erased": await service.view.slot_store.erase(number)})
        path = _path(service, (await read_body(request, FileName)).filename)
        began = perf_counter()
        about = await while_connected(request, _move(service, action, number, path))
        return JsonReply(about | {"timings": {f"{action}_ms": 1000 * (perf_counter() - began)}})
    finally:
        service.idle.resume()


async def _move(service: Service, action: str, number: int, path: Path) -> Fields:
    """Save or restore a slot, and return the fields of the answer."""
    store = service.view.slot_store
    about: Fields = {"id_slot": number, "filename": path.name}
    if action == "save":
        saved, written = await store.save(number, path)
        return about | {"n_saved": saved, "n_written": written}
    restored, size = await store.restore(number, path)
    return about | {"n_restored": restored, "n_read": size}


def _number(service: Service, text: str) -> int:
    """Return the number of the slot in the request's path. Raises RequestError."""
    known = {str(number): number for number in range(service.settings.parallel)}
    if text not in known:
        raise RequestError(f"there is no slot {text[:80]!r}: expected 0 to {len(known) - 1}", param="id")
    return known[text]


def _path(service: Service, name: str) -> Path:
    """Return the path of a file in --slot-save-path. Raises RequestError."""
    if not service.settings.slot_save_path:
        raise RequestError("this server was started without --slot-save-path: slots cannot be saved or restored", status=501)
    if not name.isprintable() or name != Path(name).name or name.startswith(".") or "\\" in name:
        raise RequestError(f"filename is {name[:80]!r}: expected a file's name, without a path", param="filename")
    if not 0 < len(name.encode()) <= MAX_NAME:
        raise RequestError(f"filename has {len(name.encode()):,} bytes: expected 1 to {MAX_NAME}", param="filename")
    return Path(service.settings.slot_save_path).expanduser() / name


# ---- The routes that show the server's state: health, slots, metrics. ---------------------------------------------------

TEXTS = ("dry_sequence_breakers", "logit_bias")  # parameters that have a client's texts or the tokens of such texts


async def health(request: Request) -> Response:
    state = request.app.state.app
    state.loaded()
    if seconds := state.hanging:
        raise RequestError(f"a step hangs: it has taken {seconds:.0f} s so far", status=503, code="step_hangs")
    if reason := state.models.failure:
        raise RequestError(f"no model can be loaded: {reason}", status=503, code="loading_failed")
    return JsonReply({"status": "ok"} | state.models.shown())


async def slots(request: Request) -> Response:
    """List the slots, without clients' texts. With `?fail_on_no_slot=1`, answer with an error if all slots are busy."""
    service = service_of(request)
    _check_shown(service.settings.slots, "--slots")
    slots = await service.view.slots()
    if request.query_params.get("fail_on_no_slot") and all(slot.task for slot in slots):
        raise RequestError("no slot available: all of them are busy", status=503, retry_after=1)
    running = {generation.request.id: generation for generation in service.open}
    return JsonReply([_slot(service, slot, running) for slot in slots])


def _slot(service: Service, slot: SlotState, running: Mapping[int, Generation]) -> Fields:
    """Return a slot with llama-server's fields and our own fields.

    For an idle slot, the fields about a request are the id and the token counts of the slot's last request.
    """
    task = slot.task
    fields: Fields = {
        "id": slot.id,
        "n_ctx": service.submitter.limit,
        "speculative": service.submitter.draft != "off",
        "is_processing": task is not None,
    }
    if task is None:
        more = {
            "id_task": slot.last,
            "n_prompt_tokens": slot.tokens,
            "prefix_cache_tokens": slot.prefix_cache_tokens,
            "prefix_cache_ratio": slot.prefix_cache_ratio,
            "next_token": [_next_token(0, -1)],
        }
        return fields | (more if slot.last >= 0 else {}) | {"sequence": slot.sequence}
    generation = running.get(task.id_task)
    left = task.limit - task.generated_tokens
    more = {
        "n_prompt_tokens": task.prompt_tokens,
        "n_prompt_tokens_processed": max(min(task.computed_tokens, task.prompt_tokens) - task.cached_tokens, 0),
        "n_prompt_tokens_cache": task.cached_tokens,
        "next_token": [_next_token(task.generated_tokens, left)],
    }
    return fields | more | asdict(task) | ({"params": _params(generation)} if generation else {})


def _params(generation: Generation) -> Fields:
    """Return the sampling parameters, except the parameters that have a client's texts."""
    return {name: value for name, value in generation.sampling.shown().items() if name not in TEXTS}


def _next_token(decoded: int, left: int) -> Fields:
    return {"has_next_token": left > 0, "n_remain": left, "n_decoded": decoded}


async def metrics(request: Request) -> Response:
    state = request.app.state.app
    _check_shown(state.settings.metrics, "--metrics")
    headers = {"Process-Start-Time-Unix": str(state.started)}
    return Response(await state.metrics(loaded_of(request).service), media_type="text/plain; version=0.0.4", headers=headers)


def _check_shown(shown: bool, flag: str) -> None:
    """Raise RequestError if a route is not shown. flag: the flag that turns the route on."""
    if not shown:
        raise RequestError(f"this server was started without {flag}", status=501)
