"""The ASGI application: its state, its routes, and the middleware around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from functools import cache as cached
from hashlib import blake2b
from pathlib import Path
from time import time

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .api.ollama_models import asks_whether_it_runs, greet
from .api.routes import ROUTES, ApiRoute
from .config.settings import Settings
from .http.api_errors import RequestError, handlers, no_route
from .http.bodies import Bodies
from .http.connection import Spelling
from .http.log import RequestLog
from .http.security import guards
from .search.attachments import Attachments
from .search.folder import FolderIndex
from .search.vectors import Vectors
from .service.metrics import exposition_of_vectors
from .service.models import ModelEntry, Models
from .service.repeats import Refusals, Repeats
from .service.service import Service

# ---- The page: files of this package for a browser. Their headers allow the page no content from other servers. ----------

FOLDER = Path(__file__).parent / "page"
FIRST = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
}

# What a browser may do with the page. Scripts and styles come only from this server's files. No text can become a script:
# `innerHTML` and similar properties accept only DOMPurify's output (Trusted Types).
POLICY = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' data:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a browser caches the files, but asks before each use whether they have changed
}


@dataclass(frozen=True, slots=True)
class File:
    """A file of the page.

    kind: the file's Content-Type.
    tag: the file's ETag.
    """

    content: bytes
    kind: str
    tag: str


@cached
def files() -> dict[str, File]:
    """Return the page's files by their paths in the page's folder."""
    found = sorted(path for path in FOLDER.rglob("*") if path.suffix in KINDS)
    return {path.relative_to(FOLDER).as_posix(): _read(path) for path in found}


async def show(request: Request) -> Response:
    """Answer with the page or one of its files. At `/`, clients of Ollama get the answer "Ollama is running" instead."""
    if request.scope["path"] == "/" and asks_whether_it_runs(request):
        return await greet(request)
    file = files().get(request.path_params.get("path", FIRST))
    if file is None:
        raise no_route(request.scope["path"])
    headers = HEADERS | {"ETag": file.tag}
    if file.tag in map(str.strip, request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers | {"Content-Type": file.kind})


def _read(path: Path) -> File:
    content = path.read_bytes()
    return File(content, KINDS[path.suffix], f'"{blake2b(content, digest_size=12).hexdigest()}"')


PAGE = ApiRoute("GET", "/ /page/{path:path}", show, chooses=False)
NO_PAGE = ApiRoute("GET", "/", greet, chooses=False)


@dataclass(slots=True)
class AppState:
    """The state of a running server.

    entries: see `Models`.
    started: the time of the start, in seconds since 1970.
    refusals: remembers requests whose prompts were too long.
    repeats: remembers the prompts of requests that do not use the cache.
    doing: the current step of loading the model, for error messages. Empty if unknown.
    attachments: the files that clients attach.
    """

    settings: Settings
    bodies: Bodies
    entries: InitVar[Sequence[ModelEntry]] = ()
    started: int = field(default_factory=lambda: int(time()))
    refusals: Refusals = field(default_factory=Refusals)
    repeats: Repeats = field(default_factory=Repeats)
    doing: str = ""
    models: Models = field(init=False)
    attachments: Attachments = field(init=False)

    def __post_init__(self, entries: Sequence[ModelEntry]) -> None:
        self.models, self.attachments = Models(entries, self.settings), Attachments(self.settings)

    @property
    def service(self) -> Service | None:
        """The service of the first model.

        The service is None while the model loads, and for an encoder, because an encoder generates no text.
        """
        return self.models.served.service if self.models.served else None

    @property
    def vectors(self) -> Vectors | None:
        """The parts that compute vectors with the first model and the models beside it; None while the first model loads."""
        return self.models.served.vectors if self.models.served else None

    @property
    def folder_index(self) -> FolderIndex | None:
        """The index of --docs; None while the first model loads, and without --docs."""
        return self.models.served.folder_index if self.models.served else None

    @property
    def failure(self) -> str | None:
        """Why an engine has ended for good; None while all engines can run."""
        return next((one.engine.failure for one in self.services if one.engine.failure), None)

    @property
    def services(self) -> list[Service]:
        """The services of all loaded models that generate text."""
        return [one.service for one in self.models.opened() if one.service is not None]

    @property
    def is_asleep(self) -> bool:
        """Whether all models are unloaded and no request waits for a model."""
        workers = self.vectors.workers if self.vectors else []
        engines = [service.engine.sleep for service in self.services]
        return all(one.is_asleep for one in (*engines, *workers))

    def loaded(self) -> Vectors:
        """Return `vectors` of the loaded model, after a check that the server can answer requests.

        Raises RequestError 503 while the first model loads, and also once an engine has ended for good.
        """
        if self.vectors is None:
            doing = f": {self.doing}" if self.doing else ""
            raise RequestError(f"the model is loading{doing}", status=503, code="loading_model", retry_after=1)
        if self.failure:
            raise RequestError(self.failure, status=503, code="engine_failed")
        return self.vectors

    @property
    def hanging(self) -> float:
        """How long the longest hanging step has run, in seconds. 0 if no step hangs."""
        return max((service.engine.watchdog.hanging for service in self.services), default=0.0)

    def ready(self) -> Service:
        """Return the service of the first model.

        Raises RequestError 503 as `loaded` does, and RequestError 501 if the model is an encoder.
        """
        vectors = self.loaded()
        if self.service is None:
            raise RequestError(f"{vectors.name} generates no text: it is served for vectors or scores only", status=501)
        return self.service

    async def metrics(self, service: Service | None) -> bytes:
        """Return the metrics of a model in Prometheus' text format. Raises RequestError as `loaded` does.

        service: the model's service; None for a model that generates no text.
        """
        computed = self.loaded().computed
        if service is None:
            return exposition_of_vectors(computed)
        return service.metrics.exposition(await service.view.stats(), computed, self.folder_index, self.attachments)

    def stop(self) -> None:
        """Fail all open requests with the error that the server is shutting down."""
        self.attachments.stop()
        for service in self.services:
            service.engine.stop()
        if self.vectors is not None:
            self.vectors.stop()
        if self.folder_index is not None:
            self.folder_index.watcher.stop()

    def close(self) -> None:
        """Close the indexes and free the models."""
        self.attachments.close()
        if self.folder_index is not None:
            self.folder_index.close()
        for loaded in self.models.opened():
            loaded.vectors.close()
        for service in self.services:
            service.close()


class TrailingSlash:
    """Removes the trailing slash that some clients add to a path.

    A redirect would not help, because the clients that add a slash do not follow redirects.

    The slash stays if no route has the path without it. The slash also stays if the path may end in a name that contains
    slashes, such as the name of a model.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self._app = app
        self._patterns = [route.path_regex for route in routes if ":path}" not in route.path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.endswith("/") and any(pattern.match(path[:-1]) for pattern in self._patterns):
            scope["path"], scope["raw_path"] = path[:-1], scope["raw_path"].removesuffix(b"/")
        await self._app(scope, receive, send)


def make_app(state: AppState) -> Starlette:
    """Return the ASGI application for this state. Raises SettingsError."""
    rows = (*ROUTES, PAGE if state.settings.ui else NO_PAGE)
    ordered = sorted(rows, key=lambda row: row.opening is None)  # generating routes first: starlette tries one by one
    routes = [route for row in ordered for route in row.routes()]
    around = [Middleware(TrailingSlash, routes=routes), Middleware(Spelling), Middleware(RequestLog)]
    app = Starlette(
        routes=routes,
        middleware=[*around, *guards(state.settings)],
        exception_handlers=handlers("server"),
    )
    app.state.app, app.state.rows, app.state.document = state, rows, None
    return app
