"""The models and the settings as llama-server shows them: `/props` and the list of models."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite

from starlette.requests import Request
from starlette.responses import Response

from ..engine.view import Fields
from ..errors import RequestError
from ..flags.setting import listed
from ..service import Service
from .http import Json, service_of, vectors_of


async def show(request: Request) -> Response:
    """Show llama-server's properties and every setting; of an encoder, those that it has."""
    vectors, service = vectors_of(request), request.app.state.host.service
    shown = (_properties(service) if service else {}) | vectors.properties()
    shown |= {"ui_settings": {"sources": request.app.state.host.library is not None}}
    return Json(shown | {"is_sleeping": request.app.state.host.is_asleep})


def _properties(service: Service) -> Fields:
    settings, model = service.settings, service.model
    params = service.intake.defaults.sampling.shown() | {"n_predict": service.intake.defaults.limit}
    return {
        "default_generation_settings": {"params": params, "n_ctx": service.intake.limit},
        "total_slots": settings.parallel,
        "model_ftype": model.file_type,
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": settings.slots,
        "endpoint_props": settings.props,
        "endpoint_metrics": settings.metrics,
        "ui": settings.ui,
        "chat_template": service.template.source,
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


def _device(service: Service) -> Fields:
    """Return the device that computes, its times if it was timed, and its costs: null for a threshold never reached."""
    context, device = service.context, service.model.device
    costs = {name: value if isfinite(value) else None for name, value in asdict(context.costs).items()}
    return {
        "name": device.name if device else "CPU",
        "description": device.description if device else "",
        "times": asdict(context.times) if context.times else None,
        "costs": costs,
    }


def _drafts(service: Service) -> Fields:
    """Return the mode of requests that leave `draft` out, and why it is off although --draft asks for more."""
    why = service.intake.why_no_drafts
    return {"mode": "off", "why": why} if why and service.settings.draft != "off" else {"mode": service.settings.draft}


async def change(request: Request) -> Response:
    """Refuse to change properties, or change nothing where --props allows it, as llama-server does."""
    if not service_of(request).settings.props:
        raise RequestError("this server was started without --props", status=501)
    return Json({"success": True})


async def models(request: Request) -> Response:
    """List the served model, for OpenAI's clients and for Ollama's, and the models beside it for vectors and scores."""
    data = _models(request)
    return Json({"models": [_as_ollama(str(entry["id"]), request) for entry in data], "object": "list", "data": data})


async def model(request: Request) -> Response:
    """Show a model by one of its names."""
    name, data = request.path_params["id"], _models(request)
    for entry in data:
        if name in (entry["id"], *entry["aliases"]):  # type: ignore[misc]
            return Json(entry)
    known = ", ".join(str(entry["id"]) for entry in data)
    raise RequestError(f"no model {name[:80]!r} is served here: expected {known}", status=404, code="model_not_found")


def _models(request: Request) -> list[Fields]:
    """Return OpenAI's object for each model. Of the served one, `n_ctx` is what a request may have."""
    vectors, host = vectors_of(request), request.app.state.host
    return [
        {
            "id": name,
            "aliases": host.settings.names(vectors.model.path) if name == vectors.name else (name,),
            "tags": sorted(listed(host.settings.tags)) if name == vectors.name else [],
            "object": "model",
            "created": host.started,
            "owned_by": "slotcache",
            "meta": about | ({"n_ctx": host.service.intake.limit} if host.service and name == vectors.name else {}),
        }
        for name, about in vectors.models().items()
    ]


def _as_ollama(name: str, request: Request) -> Fields:
    """Return a model in the words of Ollama, of which clients read the name and the capabilities."""
    vectors, service = vectors_of(request), request.app.state.host.service
    able = {
        "completion": service is not None and name == vectors.name,
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
