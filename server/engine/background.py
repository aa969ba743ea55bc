"""Prompts that are computed in idle time, ahead of their requests. It belongs to the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from ...slots.scheduler import Scheduler
from .generation import Generation

MAX_GENERATIONS = 64


class Background:
    """One generation for each key: a later one of the same key replaces it.

    end: takes a generation out of the engine; what of it is computed stays in the cache. max_generations: that are not
    done yet.
    """

    def __init__(self, scheduler: Scheduler, end: Callable[[Generation], None]) -> None:
        self._scheduler, self._end = scheduler, end
        self._generations: dict[Hashable, Generation] = {}
        self.max_generations = MAX_GENERATIONS
        self.num_dropped = 0

    def __len__(self) -> int:
        """Generations that are not done yet."""
        self._forget_done()
        return len(self._generations)

    def put(self, key: Hashable, generation: Generation) -> bool:
        """Replace the generation of a key. False: a client's request runs or waits, or too many are not done."""
        self.drop(key)
        if not all(request.background for request in (*self._scheduler.running, *self._scheduler.waiting)):
            return False
        if len(self) >= self.max_generations:
            return False
        self._generations[key] = generation
        return True

    def drop(self, key: Hashable) -> bool:
        """End the generation of a key. True: it was not done yet."""
        generation = self._generations.pop(key, None)
        if generation is None or generation.done:
            return False
        self._end(generation)
        self.num_dropped += 1
        return True

    def drop_scope(self, scope: str) -> None:
        """End the generations of a scope."""
        for key in [key for key, generation in self._generations.items() if generation.scope == scope]:
            self.drop(key)

    def drop_all(self) -> None:
        """End all: a client's request needs the engine."""
        for key in list(self._generations):
            self.drop(key)

    def _forget_done(self) -> None:
        for key in [key for key, generation in self._generations.items() if generation.done]:
            del self._generations[key]
