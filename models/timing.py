"""Measures how long the work of a context takes: tiles of attention on a CPU, all kinds of work on any other device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter

from ..slots.plan import Drop, HostCopy, Restore, Save, Trim
from . import llama
from .context import Context
from .errors import RunnerError
from .runner import ALL, Runner
from .times import Times, without_contradictions

logger = logging.getLogger("slotcache")
MayGoOn = Callable[[str], bool]
"""Called with a phrase for the timed work. Returns whether the timing may continue."""
FEW = 16  # tokens of a short run
ROWS = 4  # tokens of a batch in which each token has logits
SCATTERED = 4  # tokens in separate cells; without flash attention, a card takes a second for these
MOST_DEPTH, MOST_IDLE = 512, 8192  # cells
DEEP = 128  # cells; with fewer, attention is hard to time on any CPU
PATIENCE = 0.5  # s for each kind of work; a slow device does less of it
TRIES, FEWEST_TRIES = 3, 2  # tries of each kind of work; the fastest counts
TURNS, ENOUGH_TURNS = 5, 5.0  # rounds that time a CPU's tiles; s after which no further round begins
SLOW = 2.0  # s for a chunk; on a slower device the other times stay unknown, on a slower CPU the tiles stay as assumed
MOST_CUTS = 3  # starts that may end at BOUND; each start loads the kernels that earlier starts have compiled
BOUND = 30.0  # s for all work of a device; work that may end later is not started
LONG = 2.0  # s after which each kind of work is logged
CHANGED = 5.0  # a ratio of times above which the device's speed has changed since the times were stored


class Stopped(Exception):
    """The server is stopping, so no more work is timed."""


class OutOfTime(Exception):
    """The time limit is reached. Times that are still missing stay unknown."""


def chunk_of(context: Context) -> int:
    """Return how many tokens a timed chunk has. Two chunks must fit in a batch, and four chunks in the pool."""
    return min(context.costs.chunk, context.batch // 2, context.num_cells // 4)


class Timing:
    """Measures how long work in a context takes, and leaves the pool empty. Nothing else may use the context meanwhile.

    goes_on: called with `doing` before each batch. If `goes_on` returns False, the timing ends.
    doing: a phrase that describes the timed work, for `goes_on` and the log.
    """

    def __init__(self, context: Context, goes_on: MayGoOn = lambda _: True, doing: str = "timing") -> None:
        self._context, self._runner, self._chunk = context, Runner(context), chunk_of(context)
        self._goes_on, self._doing = goes_on, doing

    def _compute(self, start: int, stop: int, sequence: int = 0) -> None:
        self._check()
        self._runner.compute_zeros(start, stop, sequence)

    def _check(self) -> None:
        if not self._goes_on(self._doing):
            raise Stopped

    def _remove(self, start: int, sequence: int = 0) -> None:
        self._runner.apply(Trim(sequence, start, ALL) if start else Drop(sequence))

    def _depth(self, chunk: float, fewest: int) -> int:
        """Return how many tokens, in whole chunks, to compute before the batches that measure attention.

        Return 0 if the pool is too small, or if the model was trained for too few tokens.

        chunk: the seconds that a chunk takes.
        fewest: a result other than 0 has at least this many chunks.
        """
        size, model, most = self._chunk, self._context.model, self._most
        trained = (model.context_train or most) - 2 * size
        num_chunks = max(fewest, min(round(PATIENCE / chunk), MOST_DEPTH // size, most // (4 * size), trained // size))
        return num_chunks * size if most >= 4 * num_chunks * size and trained >= num_chunks * size else 0

    @property
    def _most(self) -> int:
        """The most cells that the timing may use."""
        return self._context.num_cells - 4 * self._chunk


# ---- The CPU ------------------------------------------------------------------------------------------------------------


class TileTiming(Timing):
    """Measures how long batches take on a CPU, in an empty pool and after many tokens."""

    def run(self) -> Times:
        """Return the times. Raises RunnerError and Stopped."""
        try:
            return self._run()
        finally:
            self._runner.clear()

    def _run(self) -> Times:
        size = self._chunk
        for tokens in (size, 1):  # untimed, since llama.cpp allocates
            self._batch(tokens)
        step, chunk = self._batch(1), self._batch(size)
        times = Times(chunk_tokens=size, step=step, chunk=chunk, double=chunk)
        if chunk > SLOW or not (depth := self._depth(chunk, DEEP // size)):
            return times
        return self._in_turns(times, depth)

    def _in_turns(self, times: Times, depth: int) -> Times:
        """Measure batches in an empty pool and after `depth` tokens, in several rounds.

        Return `times` with the shortest measured times.

        The time of attention is the difference between a batch's times in the empty pool and after `depth` tokens, a few
        milliseconds. Within seconds, a machine's speed may change by more than this difference, so each round times the
        empty and the filled pool.
        """
        size, began, turns = self._chunk, perf_counter(), list[dict[str, float]]()
        while len(turns) < TURNS and (not turns or perf_counter() - began < ENOUGH_TURNS):
            turn = {"chunk": self._batch(size), "double": self._batch(2 * size)}
            for start in range(0, depth, size):
                self._compute(start, start + size)
            turns.append(turn | {"short_deep": self._batch(size - 1, depth), "chunk_deep": self._batch(size, depth)})
            self._runner.clear()
        return replace(times, depth=depth, **{name: min(turn[name] for turn in turns) for name in turns[0]})

    def _batch(self, size: int, start: int = 0) -> float:
        """Return the seconds that a batch takes. Free the batch's cells afterwards."""
        tries: list[float] = []
        while len(tries) < (FEWEST_TRIES if start else 1) or (len(tries) < TRIES and sum(tries) < PATIENCE):
            began = perf_counter()
            self._compute(start, start + size)
            tries.append(perf_counter() - began)
            self._remove(start)
        return min(tries)


# ---- Another device -----------------------------------------------------------------------------------------------------


class DeviceTiming(Timing):
    """Measures how long each kind of work takes on a device other than the CPU. The most useful times are measured first.

    At the first use of a kernel, a device compiles or loads it, which may take a thousand times as long as the work. Each
    kind of work is therefore done once untimed, and is then timed at least twice. A time stays unknown if the time limit is
    reached before it is measured, or if it contradicts other times.
    """

    def __init__(self, context: Context, goes_on: MayGoOn = lambda _: True, doing: str = "timing") -> None:
        super().__init__(context, goes_on, doing)
        self._name, self._began, self._longest = doing, perf_counter(), 0.0
        self.is_cut = False
        """Whether the time limit has ended the timing."""
        self.is_doubtful = False
        """Whether some times contradicted each other, so that no time is worth storing."""

    def run(self) -> Times:
        """Return the times. Raises RunnerError and Stopped."""
        found = Times(chunk_tokens=self._chunk, step=0.0)
        kinds = self._kinds()
        try:
            for number, (name, kind) in enumerate(kinds.items(), 1):
                self._doing = f"{self._name}, {number} of {len(kinds)}: {name}"
                if found.chunk > SLOW:
                    break
                is_long = perf_counter() - self._began > LONG
                logger.log(logging.INFO if is_long else logging.DEBUG, "%s", self._doing)
                found = replace(found, **kind(found))
        except OutOfTime:
            self.is_cut = True
            logger.info("%s: it takes too long, and what was not timed is unknown", self._doing)
        finally:
            self._runner.clear()
        times = without_contradictions(found)
        self.is_doubtful = times != found
        return times

    def agrees(self, times: Times) -> bool:
        """Return whether a token still takes about as long as in `times`. Raises RunnerError and Stopped."""
        try:
            step = self._step(times)["step"]
        except OutOfTime:
            return True
        finally:
            self._runner.clear()
        return not times.step or times.step / CHANGED <= step <= times.step * CHANGED

    def _kinds(self) -> Mapping[str, Callable[[Times], dict[str, float]]]:
        """Return the methods that time a kind of work, in the order in which to call them.

        The keys of the result are names of the work, for the log. Each method returns fields of `Times`, and relies on what
        the method before it left in the pool.
        """
        kinds = {"a token": self._step, "a chunk": self._one_chunk, "two chunks": self._two_chunks, "rows": self._rows}
        if not self._context.model.can_trim:
            return kinds | ({"saves": self._saves} if self._runs_are_apart() else {})
        deep = {"behind others": self._after_others, "moves": self._moves, "moves of a few": self._moves_of_few}
        return kinds | deep | {"beside idle cells": self._beside_idle, "scattered": self._scattered}

    def _runs_are_apart(self) -> bool:
        """Return whether the runs of a hybrid model can be saved without its recurrent states."""
        try:
            sizes = None if llama.llama_model_is_recurrent(self._context.model.handle) else self._runner.measure_states()
        except RunnerError:  # the engine measures the states again, and reports the error
            return False
        return sizes is not None and bool(sizes.run_token)

    # ---- kinds of work ---------------------------------------------------------------------------------------------

    def _step(self, _: Times) -> dict[str, float]:
        return {"step": self._batch(1)}

    def _one_chunk(self, times: Times) -> dict[str, float]:
        self._check_time(times.step * self._chunk)  # at worst, a chunk takes as long as its tokens one by one
        return {"chunk": self._batch(self._chunk)}

    def _two_chunks(self, _: Times) -> dict[str, float]:
        return {"double": self._batch(2 * self._chunk)}

    def _rows(self, _: Times) -> dict[str, float]:
        rows = min(ROWS, self._context.max_rows, self._context.batch)
        if rows < 2:
            return {}
        compute = self._runner.compute_zeros
        return {
            "rows": rows,
            "step_rows": self._fastest(lambda: compute(0, rows, drafted=rows - 1), lambda: self._remove(0)),
        }

    def _after_others(self, times: Times) -> dict[str, float]:
        size, depth = self._chunk, self._depth(times.chunk, 1)
        if not depth:
            return {}
        for start in range(0, depth, size):
            self._check_time(self._longest)
            self._compute(start, start + size)
        return {"depth": depth, "chunk_deep": self._batch(size, depth), "short_deep": self._batch(size - 1, depth)}

    def _moves(self, times: Times) -> dict[str, float]:
        if not times.depth:
            return {}
        save, restore = self._move(times.depth)
        return {"save": save, "restore": restore}

    def _moves_of_few(self, times: Times) -> dict[str, float]:
        if not times.depth:
            return {}
        save, restore = self._move(FEW)
        return {"few": FEW, "save_few": save, "restore_few": restore}

    def _beside_idle(self, times: Times) -> dict[str, float]:
        if not times.depth or not (idle := self._fill(times.depth)):
            return {}
        last = self._context.scratch - 1
        return {
            "idle": idle,
            "step_idle": self._batch(1, sequence=last),
            "chunk_idle": self._batch(self._chunk, sequence=last),
        }

    def _scattered(self, times: Times) -> dict[str, float]:
        """Measure how long it takes to save tokens whose cells alternate with the cells of another sequence."""
        if not times.few:
            return {}
        return self._save_scattered()

    def _saves(self, _: Times) -> dict[str, float]:
        """Measure how long a hybrid model takes to save scattered tokens, and to save the same number of adjacent tokens.

        Both measured times include work that does not depend on the tokens' cells, such as copying the recurrent state.
        """
        scattered = self._save_scattered()
        self._runner.clear()
        self._compute(0, SCATTERED)
        save = self._fastest(lambda: self._runner.apply(Save(0, HostCopy(0, SCATTERED))))
        return scattered | {"few": SCATTERED, "save_few": save}

    def _save_scattered(self) -> dict[str, float]:
        self._runner.clear()
        for position in range(SCATTERED):
            self._check()
            self._runner.compute_zeros(position, position + 1, 0, 1)
        seconds = self._fastest(lambda: self._runner.apply(Save(0, HostCopy(0, SCATTERED))))
        return {"scattered": SCATTERED, "save_scattered": seconds}

    # ---- parts of the work -----------------------------------------------------------------------------------------

    def _batch(self, size: int, start: int = 0, sequence: int = 0) -> float:
        """Return the seconds that a batch takes. Free the batch's cells afterwards."""
        compute, undo = self._runner.compute_zeros, self._remove
        return self._fastest(lambda: compute(start, start + size, sequence), lambda: undo(start, sequence))

    def _move(self, size: int) -> tuple[float, float]:
        """Return the seconds to save the first `size` cells of sequence 0, and to restore them to another sequence."""
        copy, runner = HostCopy(0, size), self._runner
        save = self._fastest(lambda: runner.apply(Save(0, copy)))
        return save, self._fastest(lambda: runner.apply(Restore(copy, 1, 0, size)), lambda: self._remove(0, 1))

    def _fill(self, depth: int) -> int:
        """Copy the KV of sequence 0 to other sequences with cells of their own.

        Return how many cells sequence 0 and its copies use.

        Stop at `MOST_IDLE` cells, after `PATIENCE` seconds, or if no sequence id is left.
        """
        copy, used, began = HostCopy(0, depth), depth, perf_counter()
        self._runner.apply(Save(0, copy))
        for sequence in range(1, self._context.scratch - 1):
            if used + depth > min(MOST_IDLE, self._most) or perf_counter() - began > PATIENCE:
                break
            self._runner.apply(Restore(copy, sequence, 0, depth))
            used += depth
        return used

    def _fastest(self, act: Callable[[], None], undo: Callable[[], None] = lambda: None) -> float:
        """Call `act` once untimed and then a few times, with `undo` after each call. Return the seconds of the fastest call.

        Raises OutOfTime.
        """
        tries: list[float] = []
        self._check_time(self._longest)
        self._longest = max(self._longest, self._seconds(act, undo))
        while len(tries) < FEWEST_TRIES or (len(tries) < TRIES and sum(tries) < PATIENCE):
            self._check_time(max(tries, default=0.0))
            tries.append(self._seconds(act, undo))
        return min(tries)

    def _check_time(self, seconds: float) -> None:
        """Raise OutOfTime if work that takes `seconds` would end after the time limit."""
        if perf_counter() - self._began + seconds > BOUND:
            raise OutOfTime

    def _seconds(self, act: Callable[[], None], undo: Callable[[], None]) -> float:
        self._check()
        began = perf_counter()
        act()
        seconds = perf_counter() - began
        undo()
        return seconds
