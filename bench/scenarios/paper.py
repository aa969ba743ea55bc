"""Repeats the papers' evaluations: curves over the rate, the workload and memory; orders; conversations of four turns."""

from __future__ import annotations

import argparse
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from math import nan
from pathlib import Path
from typing import Any

from aiohttp import ClientSession

from ...models.demo import FILE as EMBEDDED
from ...ordering.policy import arrange
from ...ordering.tree import KnowledgeTree
from ...slots.eviction import POLICIES
from .. import report as machine
from ..client import Client, Run, drive, drive_open
from ..points import Points, interval, spread
from ..report import Bar, BenchError, Cell, Report, Table, mean, median, percentile
from ..server_api import Body, ChatApi, History, Sampling, StreamChunk
from ..servers import Arm, add_options, arms_for, bench_model, sampling
from ..simulated import serve, shuffled
from ..trace import Query, burst, conversations, skewed

MODELS = ("bench", "embedded")
PAUSE = 0.1  # s after each answer to a single client, in which idle KV moves
WARM_UP = 5  # first requests of a trace, which do not count, as in RAGCache++ and CacheWeaver
FAST = 0.6  # times the cold median: a request with a lower TTFT is fast, as in these papers
TIMES = 5.0  # times the TTFT at the lowest rate: RAGCache's limit (7, Metrics)
REQUIRED = 1.6  # slotcache's rate at that limit over llama-server's
TOKENS = 200  # approximate tokens of a document, as in the papers
WORDS = {"embedded": 88}
"""The words of a document if a model's tokenizer is unusual. The embedded model's has more than two tokens per word."""
USUAL = 158
LONG = 2.5  # times the usual length: a document of the skewed trace, so that two are as long as five usual documents
TRACES = ("burst", "skewed")
SHUFFLED = ("rate", "memory", "steady")  # panels that do not vary the trace
EVERYTHING = 8192  # MiB of host memory, enough for all KV of any trace here
THEIRS = "llama-server"
AT_ONCE = 4  # clients of the steady state
GAINED = 1.5  # slotcache's rate in the steady state over llama-server's


@dataclass(frozen=True, slots=True)
class Way:
    """slotcache with one part changed.

    fields: the fields of each request.
    flags: the flags of the server.
    order: the policy by which this module orders documents; empty: the server orders them.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    order: str = ""


OWN = Way("slotcache")
COLD = Way("no cache", {"cache_prompt": False})
RANKED, SORTED, GREEDY = (Way(f"{name} order", {"document_order": name}) for name in ("retrieval", "sorted", "greedy"))
RECENT, ORACLE = (Way(f"{name} order", order=name) for name in ("recency", "oracle"))
FIFO = Way("no queue", flags=("--window", "0"))
EVICTION = tuple(Way(f"{name} eviction", flags=("--eviction", name)) for name in POLICIES)
PARTS = (COLD, RANKED, SORTED, RECENT, GREEDY, FIFO, *(way for way in EVICTION if way.name != "pgdsf eviction"))


class ClientOrder:
    """Orders documents before sending, by a tree of all orders sent so far, as CacheWeaver's middleware does."""

    def __init__(self, policy: str) -> None:
        self._policy, self._tree = policy, KnowledgeTree()
        self._api = ChatApi(documents_field=True, extra={"document_order": "retrieval"})

    async def prepare(self, http: ClientSession, query: Query, history: History, sampling: Sampling) -> tuple[str, Body]:
        keys = [name for name, _ in query.documents]
        order = arrange(keys, self._tree, self._policy).order
        self._tree.insert((keys[at], TOKENS) for at in order)
        ordered = replace(query, documents=tuple(query.documents[at] for at in order))
        return await self._api.prepare(http, ordered, history, sampling)

    def read(self, event: Body) -> StreamChunk:
        return self._api.read(event)


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a panel.

    loads: the request rates, as multiples of the rate that slotcache can serve without its cache.
    parts: the loads at which arms with one part changed run.
    memory: the sizes of host memory, as shares of the trace's whole KV.
    """

    requests: int = 60
    requests_a_load: int = 70
    loads: tuple[float, ...] = (0.3, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
    parts: tuple[float, ...] = (0.3, 0.75, 1.25, 2.0, 3.0)
    overlaps: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8)
    documents: tuple[int, ...] = (1, 3, 5, 7, 10)
    clients: tuple[int, ...] = (1, 4, 8, 16, 32)
    memory: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    queries: int = 100 + WARM_UP
    seeds: int = 3
    chats: int = 10
    arriving: int = 512
    steady: int = 300


FULL = Size()
QUICK = Size(6, 6, (0.5, 2.0), (0.5, 2.0), (0.0, 0.6), (1, 5), (1, 8), (0.25, 1.0), 8 + WARM_UP, 1, 2, 64, 12)
At = Mapping[str, Any]
Drive = Callable[[Client], Awaitable[Run]]


@dataclass(frozen=True, slots=True)
class Study:
    """A panel on one model. points: the stored figures."""

    args: argparse.Namespace
    model: str
    size: Size
    points: Points

    def arm(self, way: Way, **changed: Any) -> Arm:
        """Return an arm of slotcache in one way. changed: changed options of the servers."""
        args = self._changed(changed)
        fields = dict(way.fields) | ({} if args.order_hint else {"order_hint": False})
        api = ClientOrder(way.order) if way.order else ChatApi(documents_field=True, extra=fields)
        return replace(arms_for(args, slotcache_flags=way.flags)[0], name=way.name, api=api)

    def theirs(self, slots: int | None = None, **changed: Any) -> list[Arm]:
        """Return the arm of llama-server if its path is given, else none. slots: None for llama-server's own default."""
        return [arm for arm in arms_for(self._changed(changed), llama_slots=slots) if arm.name == THEIRS]

    @property
    def words(self) -> int:
        """The words of a document."""
        return WORDS.get(self.model, USUAL)

    def trace(self, number: int, k: int = 5, share: float = 0.6, seed: int | None = None) -> list[Query]:
        """Return the burst trace. share: the overlap of questions. Regions have 10 documents, or more if necessary."""
        room, chosen = max(10, 2 * k - round(k * share)), self.args.seed if seed is None else seed
        return burst(number, k=k, overlap=share, documents_per_region=room, words=self.words, seed=chosen)

    def shuffled(self, number: int) -> list[Query]:
        """Return the trace of `--trace`. A burst trace is shuffled, as if many users asked at once."""
        if self.args.trace == "skewed":
            return skewed(number, words=round(LONG * self.words), seed=self.args.seed)
        queries = self.trace(number)
        random.Random(self.args.seed).shuffle(queries)
        return queries

    def measure(self, arm: Arm, drives: Drive, at: At) -> dict[str, Any]:
        """Return the figures of one point, each as a list of one value per request. at: values that identify the point."""
        options = {name: getattr(self.args, name) for name in ("parallel", "threads", "flash_attn", "repack")}
        options |= {"tokens": self.args.max_tokens, "own": self.args.slotcache_args, "llama": self.args.llama_args}
        options |= {"hint": self.args.order_hint, "seed": self.args.seed, "words": self.words}

        def measured() -> dict[str, Any]:
            run = arm.measure(sampling(self.args), drives)
            if not run.answered:
                raise BenchError(f"{arm.name}: no request was answered, the first with: {run.errors[0]}")
            figures = ("started", "ttft", "latency", "prompt_tokens", "cached_tokens", "error")
            return {name: [getattr(result, name) for result in run.results] for name in figures} | {"seconds": run.seconds}

        point = {"model": self.model, "arm": arm.name, **at, **self._trace, "options": options}
        return self.points.point(point, measured)

    def curves(self, points: Iterable[tuple[Any, Arm, Drive, At]]) -> dict[str, Curve]:
        """Measure points, and return curves by arm.

        points: for each point, a value of the axis, the arm, how to drive it, and values that identify the point.
        """
        found: dict[str, Curve] = {}
        for value, arm, drives, at in points:
            found.setdefault(arm.name, []).append((value, self.measure(arm, drives, at)))
        return found

    def footprint(self, queries: Sequence[Query]) -> float:
        """Return the MiB of host memory for all KV of these requests."""

        async def kept(client: Client) -> float:
            await _closed(queries)(client)
            return await client.gauge("slotcache_host_bytes")

        def measured() -> dict[str, Any]:
            arm = self.arm(OWN, ctx_size=4096, slotcache_args=f"{self.args.slotcache_args} -cram {EVERYTHING}")
            return {"bytes": arm.measure(sampling(self.args), kept)}

        at = {"model": self.model, "kept": len(queries), "own": self.args.slotcache_args, "seed": self.args.seed}
        return self.points.point(at | {"words": self.words} | self._trace, measured)["bytes"] / 2**20

    @property
    def label(self) -> str:
        """The model for titles of tables, with the trace if it is unusual."""
        return "-".join([self.model, *self._trace.values()])

    @property
    def _trace(self) -> dict[str, str]:
        """The values that identify points of an unusual trace; empty for the usual trace."""
        return {} if self.args.trace == TRACES[0] else {"workload": self.args.trace}

    def _changed(self, changed: At) -> argparse.Namespace:
        return argparse.Namespace(**vars(self.args) | dict(changed))


Curve = list[tuple[Any, dict[str, Any]]]  # values of an axis, each with its figures


@dataclass(slots=True)
class Findings:
    """The results of a panel."""

    tables: list[Table] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench paper`."""
    add = parser.add_argument
    panels = "; ".join(f"{name}: {about}" for name, (about, _) in PANELS.items())
    add("name", choices=(*PANELS, "all"), help=f"panel: {panels}")
    add_options(parser, max_tokens=6)
    every = ",".join(way.name for way in PARTS)
    add("--parts", default=every, help="rate: arms with a part switched off, '' for none (default: %(default)s)")
    add("--quick", action="store_true", help="few requests and few points, to see whether it runs; no result")
    text = "folder of points; points in it are not measured again (default: %(default)s)"
    add("--out", type=Path, default=Path("paper"), help=text)
    add("--models", default=",".join(MODELS), help="without -m: some of %(default)s (default: all)")
    text = "rate: memory for idle KV in both servers, as a share of the trace's whole KV (default: %(default)s)"
    add("--host-memory", type=float, default=0.25, help=text)
    text = "rate, memory, steady: RAGCache++'s bursts, shuffled, or RAGCache's popular documents (default: %(default)s)"
    add("--trace", choices=TRACES, default=TRACES[0], help=text)
    add("--no-order-hint", dest="order_hint", action="store_false", help="leave the retrieval ranking out of prompts")
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    """Measure the points that the folder does not have yet. Return the tables of the panels."""
    if args.url:
        raise BenchError("paper starts a server for each point: leave --url out")
    if args.trace != TRACES[0] and args.name not in SHUFFLED:
        raise BenchError(f"--trace {args.trace} is for {', '.join(SHUFFLED)}, not for {args.name}")
    found, about = Findings(), {}
    for name in PANELS if args.name == "all" else (args.name,):
        kept = Points(args.out / f"{name}{'-quick' * args.quick}.jsonl", lambda: machine.describe(args.llama_server))
        for model, path in [("", None)] if name == SIMULATED else _models(args):
            own = argparse.Namespace(**vars(args) | {"model": path})
            one = PANELS[name][1](Study(own, model, QUICK if args.quick else FULL, kept))
            found.tables += one.tables
            found.bars += one.bars
            found.notes += one.notes
        found.notes += kept.notes()
        about[name] = str(kept.path)
    if args.llama_server is None and args.name != SIMULATED:
        found.notes.append("no llama-server was given (--llama-server PATH): nothing to compare with")
    return Report("paper", found.tables, bars=found.bars, notes=found.notes, data={"points": about})


def _models(args: argparse.Namespace) -> list[tuple[str, Path]]:
    """Return the names and files of the models. Raises BenchError."""
    if args.model:
        return [(args.model.stem, bench_model(args))]
    names = args.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        raise BenchError(f"--models {unknown[0]}: expected some of {', '.join(MODELS)}")
    return [(name, EMBEDDED if name == "embedded" else bench_model(args)) for name in names]


# ---- (a) An open loop: TTFT by the rate of requests (RAGCache 7.1, 7.4). ------------------------------------------------


def rate(study: Study) -> Findings:
    """Send a trace at random moments, at rates up to three times the rate that slotcache can serve without its cache."""
    args, size = study.args, study.size
    ways, queries = (OWN, *_parts(args.parts)), study.shuffled(size.requests_a_load)
    few = queries[: max(3, size.requests // 6)]
    alone = median(_ttfts(study.measure(study.arm(COLD), lambda client: drive(client, few), {"load": "alone"})))
    host = max(1, round(args.host_memory * study.footprint(queries)))
    own_args, their_args = (f"{given} -cram {host}" for given in (args.slotcache_args, args.llama_args))

    def points() -> Iterator[tuple[float, Arm, Drive, At]]:
        for load in size.loads:
            arrivals = poisson(len(queries), load / alone, args.seed)
            chosen = [way for way in ways if way is OWN or load in size.parts]
            arms = [study.arm(way, slotcache_args=own_args, ctx_size=8192) for way in chosen]
            for arm in arms + study.theirs(args.parallel, llama_args=their_args, ctx_size=8192):
                at = {"load": load, "rate": round(load / alone, 4), "requests": len(queries), "mib": host}
                yield load / alone, arm, lambda client, arrivals=arrivals: drive_open(client, queries, arrivals), at

    curves = study.curves(points())
    means = {name: [(at, mean(_ttfts(one))) for at, one in curve] for name, curve in curves.items()}
    theirs = means.get(THEIRS)
    common = TIMES * theirs[0][1] if theirs else nan
    knees = {name: (knee(curve), knee(curve, common)) for name, curve in means.items()}
    reached = [
        (name, 1000 * means[name][0][1], *(cell for at, is_in in both for cell in (at, "yes" if is_in else "beyond")))
        for name, both in knees.items()
    ]
    columns = ("arm", "unloaded ms", "of its own", "reached", "of llama-server's", "reached")
    title = f"rate, {study.label}: {host} MiB for idle KV; alone and cold {1000 * alone:.0f} ms a request"
    rows = [(name, at, *_summary(one)) for name, curve in curves.items() for at, one in curve]
    tables = [
        Table(title, ("arm", "requests/s", *SUMMARY), rows),
        Table(f"rate, {study.label}: requests/s at {TIMES:.0f} times a TTFT", columns, reached),
    ]
    bars = []
    if theirs:
        (own, _), (other, is_reached) = knees[OWN.name][0], knees[THEIRS][0]
        name = f"{study.label}: rate at {TIMES:.0f}x TTFT over llama-server's"
        bars.append(Bar(7, name, own / other if is_reached else nan, REQUIRED, at_least=True))
    return Findings(tables, bars, _errors(curves))


def _parts(names: str) -> list[Way]:
    """Return the ways with these names. Raises BenchError."""
    known = {way.name: way for way in PARTS}
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in chosen if name not in known]:
        raise BenchError(f"--parts {unknown[0]}: expected some of {', '.join(known)}")
    return [known[name] for name in chosen]


def poisson(number: int, each_second: float, seed: int) -> list[float]:
    """Return the arrivals of a Poisson process, in seconds. A higher rate gives the same arrivals, but closer together."""
    rng = random.Random(f"arrivals {seed}")
    return list(accumulate(rng.expovariate(1.0) / each_second for _ in range(number)))


def knee(curve: Sequence[tuple[float, float]], limit: float | None = None) -> tuple[float, bool]:
    """Return the rate at which the mean TTFT passes a limit, and True. If it never does, return the highest rate and False.

    curve: the rates, ascending, with their mean TTFT, which is interpolated linearly.
    limit: a TTFT; None for 5 times the TTFT at the lowest rate.
    """
    limit = TIMES * curve[0][1] if limit is None else limit
    before = (0.0, 0.0)
    for at, ttft in curve:
        if ttft > limit:
            return before[0] + (at - before[0]) * (limit - before[1]) / (ttft - before[1]), True
        before = (at, ttft)
    return before[0], False


# ---- (b) One axis at a time (RAGCache 7.3, 7.4; RAGCache++ 4.4, 4.6; CacheWeaver 6; RAGBoost 7). ------------------------


@dataclass(frozen=True, slots=True)
class Axis:
    """A quantity that varies.

    values: returns its values for a size of panels.
    trace: returns a number of requests for a value.
    many: returns the number of clients for a value.
    """

    name: str
    values: Callable[[Size], Sequence[Any]]
    trace: Callable[[Study, int, Any], list[Query]]
    many: Callable[[Any], int] = lambda value: 1

    def __call__(self, study: Study) -> Findings:
        values = self.values(study.size)
        number = max(study.size.requests, *map(self.many, values))

        def points() -> Iterator[tuple[Any, Arm, Drive, At]]:
            for value in values:
                queries, many = self.trace(study, number, value), self.many(value)
                arms = [study.arm(way) for way in (OWN, RANKED, COLD)]
                for arm in arms + study.theirs(study.args.parallel if many > 1 else None):
                    yield value, arm, _closed(queries, many), {self.name: value, "requests": len(queries)}

        curves = study.curves(points())
        return Findings([_by_value(f"{self.name}, {study.model}", self.name, curves)], [], _errors(curves))


AXES = (
    Axis("overlap", lambda size: size.overlaps, lambda study, number, share: study.trace(number, share=share)),
    Axis("documents", lambda size: size.documents, lambda study, number, k: study.trace(number, k)),
    Axis("clients", lambda size: size.clients, lambda study, number, _: study.trace(number), many=lambda value: value),
)


def _by_value(title: str, axis: str, curves: Mapping[str, Curve]) -> Table:
    rows = [(value, name, *_summary(one)) for name, curve in curves.items() for value, one in curve]
    return Table(title, (axis, "arm", *SUMMARY), sorted(rows, key=lambda row: row[0]))


def _closed(queries: Sequence[Query], many: int = 1) -> Drive:
    return lambda client: drive(client, queries, many, pause=PAUSE if many == 1 else 0.0)


def memory(study: Study) -> Findings:
    """Vary the host memory for idle KV from none to enough for the whole trace, by eviction policy (RAGCache, table 2)."""
    queries = study.shuffled(study.size.requests)
    whole = study.footprint(queries)

    def points() -> Iterator[tuple[Any, Arm, Drive, At]]:
        for share in study.size.memory:
            flags = f" -cram {round(share * whole)}"
            own, their = study.args.slotcache_args + flags, study.args.llama_args + flags
            arms = [study.arm(way, ctx_size=4096, slotcache_args=own) for way in EVICTION]
            for arm in arms + study.theirs(ctx_size=4096, llama_args=their):
                at = {"memory": share, "mib": round(share * whole), "requests": len(queries)}
                yield round(100 * share), arm, _closed(queries), at

    curves = study.curves(points())
    title = f"memory, {study.label}: all that {len(queries)} requests leave is {whole:.0f} MiB"
    return Findings([_by_value(title, "memory %", curves)], [], _errors(curves))


def steady(study: Study) -> Findings:
    """Let clients ask without a pause until the cache is full and beyond. The first half of the requests does not count.

    RAGCache measures an hour. The possible gain is llama-server's computed tokens over slotcache's.
    """
    queries = study.shuffled(study.size.steady)
    first, flags = len(queries) // 2, f" -cram {EVERYTHING}"
    own, their = study.args.slotcache_args + flags, study.args.llama_args + flags
    arms = [study.arm(OWN, ctx_size=8192, slotcache_args=own)]
    arms += study.theirs(study.args.parallel, ctx_size=8192, llama_args=their)
    at = {"steady": len(queries), "clients": AT_ONCE, "mib": EVERYTHING}
    curves = study.curves((AT_ONCE, arm, _closed(queries, AT_ONCE), at) for arm in arms)
    halves = {name: _measured(one, first) for name, ((_, one),) in curves.items()}
    rates = {name: len(one["started"]) / _seconds(one) for name, one in halves.items()}
    rows = [(name, rates[name], *_summary(one | {"seconds": _seconds(one)})) for name, one in halves.items()]
    title = f"steady state, {study.label}: the last {len(queries) - first} of {len(queries)} requests, {AT_ONCE} clients"
    bars, notes = [], _errors(curves)
    if THEIRS in halves:
        ours, theirs = (sum(prompt - cached for cached, prompt in _tokens(halves[name])) for name in (OWN.name, THEIRS))
        notes.append(f"{study.label}: computed tokens allow {theirs / ours:.2f} of llama-server's rate")
        name = f"{study.label}: steady rate over llama-server's"
        bars.append(Bar(7, name, rates[OWN.name] / rates[THEIRS], GAINED, at_least=True))
    return Findings([Table(title, ("arm", "requests/s", *SUMMARY), rows)], bars, notes)


def _seconds(one: Mapping[str, Any]) -> float:
    """Return the seconds from the start of the first request to the end of the last."""
    return max(map(sum, zip(one["started"], one["latency"], strict=True))) - min(one["started"])


# ---- (c) Orders of documents (RAGCache++ 4.2 to 4.6; CacheWeaver 5, 6). -------------------------------------------------


def orders(study: Study) -> Findings:
    """Send the burst trace in each order of documents, one request at a time, with several seeds.

    The tables compare the share of fast requests and the saved time and tokens.
    """
    ways = (COLD, RANKED, SORTED, RECENT, GREEDY, replace(OWN, name="exact order"), ORACLE)

    def points() -> Iterator[tuple[Any, Arm, Drive, At]]:
        for seed in range(study.args.seed, study.args.seed + study.size.seeds):
            queries = study.trace(study.size.queries, seed=seed)
            for arm in [study.arm(way, order_hint=False) for way in ways] + study.theirs():
                yield seed, arm, _closed(queries), {"trace": seed, "requests": len(queries), "order": "no hint"}

    curves = study.curves(points())
    found = {name: [_measured(one) for _, one in curve] for name, curve in curves.items()}
    middle = {name: [median(_ttfts(one)) for one in runs] for name, runs in found.items()}
    shares = {name: [[c / p for c, p in _tokens(one)] for one in runs] for name, runs in found.items()}
    kept = {name: [-mean(share) for share in of] for name, of in shares.items()}
    rows, saved = [], []
    for name, runs in found.items():
        times = list(zip([_ttfts(one) for one in runs], middle[COLD.name], strict=True))
        fast = [100 * mean([t < FAST * base for t in ttfts]) for ttfts, base in times]
        less = [[1 - ttft / base for ttft in ttfts] for ttfts, base in times]
        cells = (spread([1000 * t for t in middle[name]]), spread(fast), *_percents(less, median, _p95))
        rows.append((name, *cells, _of_oracle(middle, name)))
        reusing = f"{sum(map(_num_reusing, runs))}/{sum(map(len, shares[name]))}"
        saved.append((name, *_percents(shares[name], median, mean, _p95), _of_oracle(kept, name), reusing))
    count = f"{study.size.queries - WARM_UP} queries, {study.size.seeds} seeds"
    times = ("order", "TTFT p50 ms", "fast %", "saved p50 %", "saved p95 %", "of the oracle's gain %")
    tokens = ("order", "saved p50 %", "mean", "p95", "of the oracle's gain %", "reuse a document")
    tables = [
        Table(f"orders by time, {study.model}: {count}", times, rows),
        Table(f"orders by prompt tokens, {study.model}: {count}", tokens, saved),
    ]
    return Findings(tables, [], _errors(curves))


def _percents(shares: Sequence[Sequence[float]], *figures: Callable[[Sequence[float]], float]) -> list[Cell]:
    return [spread([100 * figure(share) for share in shares]) for figure in figures]


def _of_oracle(costs: Mapping[str, Sequence[float]], name: str) -> Cell:
    """Return a way's gain over retrieval order, in % of the oracle's gain. costs: the costs of each way, by seed."""
    three = zip(costs[RANKED.name], costs[name], costs[ORACLE.name], strict=True)
    return spread([100 * (ranked - own) / (ranked - best) if ranked != best else nan for ranked, own, best in three])


def _num_reusing(one: Mapping[str, Any]) -> int:
    """Return how many requests reused a document, which is more than the system prompt that all requests share."""
    cached = [cached for cached, _ in _tokens(one)]
    return sum(number > min(cached) + TOKENS // 2 for number in cached)


def _p95(values: Sequence[float]) -> float:
    return percentile(values, 0.95)


# ---- (d) Four turns, with and without a cache (ADR 007). ----------------------------------------------------------------


def turns(study: Study) -> Findings:
    """Send conversations of four turns, one after the other, with and without the cache."""
    chats = sorted(conversations(study.size.chats, turns=4, seed=study.args.seed), key=lambda query: query.session)
    rows, ratios = [], []
    for arm in [study.arm(replace(OWN, name="with prefix cache")), study.arm(COLD), *study.theirs()]:
        one = study.measure(arm, lambda client: drive(client, chats), {"turns": 4, "chats": study.size.chats})
        latency, failed = one["latency"], sum(error is not None for error in one["error"])
        took = [1000 * sum(latency[at : at + 4]) for at in range(0, len(latency), 4)]
        rows.append((arm.name, mean(took), median(took), interval(took), failed))
        for turn in range(4):
            ttfts = [t for t in one["ttft"][turn::4] if t is not None]
            prompt, cached = (sum(one[name][turn::4]) for name in ("prompt_tokens", "cached_tokens"))
            ratios.append((arm.name, turn + 1, 1000 * median(ttfts), prompt, cached, cached / max(prompt, 1)))
    columns = ("arm", "turn", "TTFT p50 ms", "prompt tokens", "prefix_cache_tokens", "prefix_cache_ratio")
    whole = Table(f"turns, {study.model}: ms of a conversation", ("arm", "average", "median", "95 % ±", "errors"), rows)
    return Findings([whole, Table(f"turns, {study.model}, by turn", columns, ratios)])


# ---- (e) The time of scheduling by the rate of requests (RAGCache 7.5). -------------------------------------------------


SIMULATED = "scheduling"
RATES = (0.5, 1.0, 2.0, 4.0, 8.0)  # requests/s; in the simulation a single prompt takes 0.34 s


def scheduling(study: Study) -> Findings:
    """Time the real scheduler without a model. Requests of the shuffled burst trace arrive at random moments."""
    number, rows = study.size.arriving, []
    for name, policy, window in (("slotcache", "auto", 8), ("first come, retrieval order", "retrieval", 0)):
        for each_second in RATES:
            arrivals = poisson(number, each_second, study.args.seed)

            def simulate(policy: str = policy, window: int = window, arrivals: list[float] = arrivals) -> dict[str, Any]:
                return asdict(serve(shuffled(number, policy, study.args.seed), window, arrivals))

            at = {"arm": name, "rate": each_second, "requests": number, "window": window, "seed": study.args.seed}
            one = study.points.point(at, simulate)
            figures = [one[key] for key in ("cached", "p50", "p95", "overtaken")]
            rows.append((name, each_second, one["scheduling"] / 1000, one["choosing"] / 1000, *figures))
    columns = ("arm", "requests/s", "scheduling ms", "choosing ms", "cached", "TTFT p50 s", "p95", "overtaken at most")
    table = Table(f"scheduling: processor time a request, {number} requests, simulated", columns, rows)
    return Findings([table])


# ---- Figures of a point. ------------------------------------------------------------------------------------------------

SUMMARY = ("TTFT mean ms", "p50", "p95", "cached %", "seconds", "errors")


def _summary(one: Mapping[str, Any]) -> tuple[float, float, float, float, float, int]:
    ttfts = [1000 * ttft for ttft in _ttfts(one)]
    failed, pairs = sum(error is not None for error in one["error"]), _tokens(one)
    share = 100 * sum(cached for cached, _ in pairs) / max(1, sum(prompt for _, prompt in pairs))
    return mean(ttfts), median(ttfts), _p95(ttfts), share, one["seconds"], failed


def _ttfts(one: Mapping[str, Any]) -> list[float]:
    """Return the seconds to the first token of the requests that succeeded."""
    return [ttft for ttft, error in zip(one["ttft"], one["error"], strict=True) if error is None and ttft is not None]


def _tokens(one: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the cached and the prompt tokens of each request that succeeded."""
    pairs = zip(one["cached_tokens"], one["prompt_tokens"], strict=True)
    return [(cached, prompt) for cached, prompt in pairs if prompt]


def _measured(one: Mapping[str, Any], uncounted: int = WARM_UP) -> dict[str, Any]:
    """Return the figures without the first requests. uncounted: the number of these requests."""
    return {name: value[uncounted:] if isinstance(value, list) else value for name, value in one.items()}


def _errors(curves: Mapping[str, Curve]) -> list[str]:
    """Return one line for each arm with errors: their number, and the first error."""
    failed = {name: [error for _, one in curve for error in one["error"] if error] for name, curve in curves.items()}
    return [f"{name}: {len(found)} requests failed, the first with: {found[0]}" for name, found in failed.items() if found]


PANELS: dict[str, tuple[str, Callable[[Study], Findings]]] = {
    "rate": ("TTFT over the rate of requests, parts switched off", rate),
    "overlap": ("over the overlap of documents", AXES[0]),
    "documents": ("over documents a question", AXES[1]),
    "clients": ("over clients at a time", AXES[2]),
    "memory": ("over host memory, by eviction policy", memory),
    "steady": ("the rate of four clients once the cache is full", steady),
    "orders": ("orders of documents, against an oracle", orders),
    "turns": ("four turns with a cache and without", turns),
    SIMULATED: ("time of the scheduler over the rate, simulated", scheduling),
}
