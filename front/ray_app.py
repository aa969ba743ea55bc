"""slotcache in several replicas on Ray Serve: `serve run slotcache.front.ray_app:app`.

    Ray's proxy -> Ingress -> CacheRouter -> Engine (one of several)

The ingress reads each request, because Ray's routers see no bodies. An engine is the unchanged server, without a port. Ray
starts, checks, replaces and adds engines, which it calls replicas.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import msgspec
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.exceptions import ObjectLostError, RayActorError  # pyright: ignore[reportMissingImports]
from ray.serve import Application  # pyright: ignore[reportMissingImports]
from ray.serve.config import AutoscalingConfig, RequestRouterConfig  # pyright: ignore[reportMissingImports]
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError  # pyright: ignore[reportMissingImports]
from ray.serve.handle import DeploymentHandle  # pyright: ignore[reportMissingImports]
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from ..models.hardware import devices, fast_cores
from ..server import load
from ..server.app import AppState, make_app
from ..server.config.settings import Settings
from ..server.http.api_errors import RequestError, handlers
from ..server.http.bodies import Bodies, Reservation
from ..server.http.log import configure
from ..server.http.security import CrossOrigin, Gate, Keys, Origins
from ..server.serve import prepare, start
from .events import closing
from .placing import REPLICA, STORED, Answering, Asked, Fleets, Forward, Needs, ReplicaAnswer, lost, meant_for, unknown
from .replica_settings import Replicas, at_rank, read_settings

logger = logging.getLogger("slotcache")
PLACED = "x-slotcache-placed"
LIST = ("GET", "/v1/replicas")
EVERYWHERE = {
    ("DELETE", "/v1/cache"),
    ("DELETE", "/v1/speculate"),
    ("POST", "/v1/sources/refresh"),
    ("POST", "/lora-adapters"),
}
"""Requests that all replicas get, in addition to requests that delete a conversation or an answer."""
BESIDE = 100  # requests that a replica takes beyond its slots and queue: it refuses requests itself
MOST = 100_000  # requests of an ingress at a time
ASKING = 32  # questions to all replicas at a time
ENDED = (RayActorError, ObjectLostError)
"""Ray's exceptions for a replica that has ended, and for a piece of its answer that was lost with the replica."""
SOON = 30.0  # seconds for a request that all replicas must answer
LOOK = 2.0  # seconds for a question that ignores silent replicas


class Engine:
    """A replica: the server with its engine."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # in the loop that the requests run in
        configure(settings.log_format, settings.log_file, settings.verbose)
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        settings, path = await asyncio.to_thread(prepare, at_rank(settings, context.rank.rank))
        self._state = AppState(settings, Bodies.up_to(settings.max_body << 20))
        start(self._state, await asyncio.to_thread(load.load_all, settings, path))
        self._app = make_app(self._state)

    async def answer(self, forward: Forward) -> AsyncIterator[list[Message]]:
        """Answer a request, some ASGI messages at a time."""
        app = meant_for(self._name, self._app, forward)
        async for messages in Answering(app, forward).messages():
            for message in messages:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message)[REPLICA] = self._name
            yield messages

    async def whole(self, forward: Forward) -> ReplicaAnswer:
        """Answer a request, all at once."""
        answer = ReplicaAnswer()
        async for messages in Answering(self._app, forward).messages():
            for message in messages:
                answer.read(message)
        return answer

    def name(self) -> str:
        """Return the replica's name."""
        return self._name

    def holds(self, session: str) -> str:
        """Return the replica's name if it has stored this conversation or answer; otherwise an empty string."""
        kind, scope, id = msgspec.json.decode(session)
        if self._state.service is None:
            return ""
        conversations = self._state.service.conversations
        found = conversations.find(scope, id) if kind == "conversation" else conversations.find_answer(scope, id)
        return self._name if found else ""

    def check_health(self) -> None:
        """Raise RuntimeError once the engine has ended.

        After this error, Ray starts another replica in place of this one.
        """
        if self._state.failure:
            raise RuntimeError(self._state.failure)

    def __del__(self) -> None:
        if (state := getattr(self, "_state", None)) is not None:
            state.stop()
            state.close()


@serve.ingress()
class Ingress:
    """Reads requests, sends each request to a replica, and passes the replica's answer on."""

    def __init__(self, engines: DeploymentHandle, settings: Settings) -> None:
        configure(settings.log_format, settings.log_file, settings.verbose)
        self._engines, self._streams = engines, engines.options(method_name="answer", stream=True)
        self._fleets, self._keys = Fleets(settings.tool_documents), Keys.of(settings)
        self._bodies = Bodies.up_to(settings.max_body << 20)
        origins = Origins(settings)
        listed = Gate(self._list, settings, self._keys, origins)  # no replica checks the key for this list
        self._listed = CrossOrigin(listed, origins) if origins else listed
        self._asking = ThreadPoolExecutor(ASKING, "ask")

    def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", _Entrance(self))], exception_handlers=handlers("server"))

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises RequestError."""
        headers = Headers(scope=scope)
        if not self._keys.admit(headers):
            # A replica refuses the request, or answers with public data. Its body is not read, so it takes no memory.
            await self._pass_on(Asked(Forward.of(scope, b""), Needs(), self._fleets), send)
            return
        only = headers.get(REPLICA, "")
        with Reservation(self._bodies) as room:  # until it is decoded, as in `read_body`
            forward = Forward.of(scope, await self._bodies.read(Request(scope, receive), room), only)
            needs = await asyncio.to_thread(Needs.of, forward, self._fleets.tool_documents)
        if (forward.method, forward.path) == LIST:
            scope.setdefault("state", {})
            await self._listed(scope, receive, send)
            return
        if only and only not in self._fleets.names and only not in await self._names():
            raise unknown(only)
        asked = Asked(forward, needs, self._fleets)
        if not only and _is_for_all(forward):
            await self._send_to_all(forward, scope, send)
            return
        if asked.is_unknown and not only:
            await self._look_for(asked)
        await self._pass_on(asked, send)

    async def _list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the replicas that are up."""
        names = [{"id": name, "object": "replica"} for name in await self._names()]
        await JSONResponse({"object": "list", "data": names})(scope, receive, send)

    async def _look_for(self, asked: Asked) -> None:
        """Ask all replicas which of them has the stored conversation or answer that a request continues.

        A replica may have a conversation from an earlier run in its cache folder. If a replica hangs, assume that it lacks
        the conversation: otherwise conversations of other replicas would be delayed.
        """
        found = await self._ask_all(LOOK, "holds", asked.needs.stored)
        for name in found:
            if isinstance(name, str) and name:
                asked.found_at(name)

    async def _send_to_all(self, forward: Forward, scope: Scope, send: Send) -> None:
        """Send a request to all replicas. Answer with the sum of their answers, or with the first error if there is one.

        A replica's 404 counts as an error only if every replica refuses the request.
        """
        results = await self._ask_all(SOON, "whole", forward)
        if any(isinstance(one, TimeoutError) for one in results):
            raise RequestError(f"a replica was silent for {SOON:g} s", status=504, code="replica_timeout")
        failed = next((one for one in results if isinstance(one, Exception) and not isinstance(one, ENDED)), None)
        if failed:
            raise failed
        answers = [answer for answer in results if isinstance(answer, ReplicaAnswer)]
        refused = [answer for answer in answers if answer.status >= 400]
        unknown_to_all = refused[0] if refused and len(refused) == len(answers) else None
        said = next((answer for answer in refused if answer.status != 404), unknown_to_all)
        if said is None and not answers:
            raise RequestError("no replica answered: send the request again", status=503, retry_after=1)
        total = _sum([said] if said else [answer for answer in answers if answer not in refused])
        await JSONResponse(total, status_code=said.status if said else 200)(scope, _nothing, send)

    async def _names(self) -> list[str]:
        """Return the names of the replicas that are up and answer."""
        return sorted(name for name in await self._ask_all(LOOK, "name") if isinstance(name, str))

    async def _ask_all(self, seconds: float, method: str, *arguments: object) -> list[object]:
        """Call a method of all replicas. The result of a replica that has ended or is silent is an exception.

        Ray's own call for an event loop is not used: if one replica is silent, that call returns no results at all.
        """
        asking = self._engines.broadcast(method, *arguments)
        wait = partial(asking.results, timeout_s=seconds, return_exceptions=True)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._asking, wait)
        except DeploymentUnavailableError as error:
            raise turned_away(error) from None
        except TimeoutError:
            raise RequestError(f"no replica answered for {seconds:g} s", status=504, code="replica_timeout") from None

    async def _pass_on(self, asked: Asked, send: Send) -> None:
        """Send a request to a replica and its answer to the client.

        If the replica fails before anything was sent, raise RequestError.
        """
        answer, is_over = ReplicaAnswer(), False
        try:
            async for messages in self._streams.remote(asked):
                for message in messages:
                    answer.read(message)
                    if message["type"] == "http.response.start":
                        MutableHeaders(scope=message)[PLACED] = asked.why
                    is_over = message["type"] == "http.response.body" and not message.get("more_body")
                    await send(message)
        except ENDED:
            if is_over:
                return
            error = lost(asked.replica)
            logger.warning("%.128r: %s", asked.forward.path, error.message)
            if not answer.status:
                raise error from None
            if not answer.is_stream:
                raise
            await send({"type": "http.response.body", "body": closing(error, asked.forward.path), "more_body": False})
        except (BackPressureError, DeploymentUnavailableError) as error:
            raise turned_away(error) from None
        finally:
            asked.answered(answer)


class _Entrance:
    """The ingress as an ASGI application. It is a class because Starlette would take a method for a request handler."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._ingress.serve(scope, receive, send)


def turned_away(error: Exception) -> RequestError:
    """Make the error of a request that Ray has given to no replica."""
    if isinstance(error, BackPressureError):
        return RequestError("all replicas are full, and too many requests wait: try again", status=429, retry_after=1)
    return RequestError("no replica is up: try again", status=503, retry_after=1)


def _is_for_all(forward: Forward) -> bool:
    """Return whether all replicas get a request, because it deletes or changes something in each of them."""
    forgets = forward.method == "DELETE" and STORED.fullmatch(forward.path)
    return bool(forgets) or (forward.method, forward.path) in EVERYWHERE


def _sum(answers: Sequence[ReplicaAnswer]) -> dict[str, object]:
    """Return answers as one, with the sum of their tokens."""
    bodies = [msgspec.json.decode(answer.body, type=dict[str, object]) for answer in answers]
    tokens = [one["tokens"] for one in bodies if isinstance(one.get("tokens"), int)]
    return bodies[0] | ({"tokens": sum(tokens)} if tokens else {})  # type: ignore[arg-type]


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def app(arguments: Mapping[str, object]) -> Application:
    """Return the application.

    arguments: settings by name; the other settings come from the environment.

    Raises SettingsError.
    """
    own, settings = read_settings(arguments)
    Keys.of(settings)  # an error here, and not in each process that Ray starts
    gpus = own.replica_gpus if own.replica_gpus >= 0 else int(any(one.is_gpu for one in devices()))
    threads = settings.threads or max(fast_cores() // (1 if gpus else own.most), 1)
    settings = replace(settings, threads=threads)
    full = settings.parallel + settings.max_queue + BESIDE
    engines = serve.deployment(Engine).options(
        **_number(own, settings),
        ray_actor_options={"num_cpus": 0 if gpus else threads, "num_gpus": gpus},
        max_ongoing_requests=full,
        max_queued_requests=own.most * full,
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=120,
        request_router_config=RequestRouterConfig(request_router_class=own.router),
    )
    ingress = serve.deployment(Ingress).options(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=MOST)
    return ingress.bind(engines.bind(settings), settings)


def _number(own: Replicas, settings: Settings) -> dict[str, object]:
    """Return Ray's options for the number of replicas."""
    if own.most == own.replicas:
        return {"num_replicas": own.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=own.replicas,
            max_replicas=own.most,
            target_ongoing_requests=settings.parallel,
            upscale_delay_s=own.upscale_delay,
            downscale_delay_s=own.downscale_delay,
        )
    }
