"""How generations enter the engine, and how they leave it before their end."""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future

from ...models.model import Model
from ...models.sampling import GREEDY, Sampler
from .engine import Engine
from .generation import Generation


class Door:
    """For the event loop's thread. Every act waits for the end of the engine's step; a background step ends early."""

    def __init__(self, engine: Engine, model: Model) -> None:
        self._inbox, self._roster, self._background = engine.inbox, engine.roster, engine.background
        self._interrupt, self._model = engine.runner.interrupt, model

    def submit(self, generation: Generation) -> None:
        """Queue a generation. What may fail, fails here, in the caller's thread. Raises RequestError once it is stopped."""
        sampler = Sampler(self._model, generation.sampling)
        if not self._inbox.put(lambda: self._enter(generation, sampler)):
            sampler.close()
            raise self._inbox.refusal()
        self._interrupt.set()

    def cancel(self, generation: Generation) -> Future[None]:
        """Let go of a generation whose client has gone, by the next step; done when that is so."""
        self._inbox.put(lambda: self._roster.end(generation))  # an error in it is a failed step, not the asker's
        return self._inbox.ask(lambda: None)

    def compute_ahead(self, key: Hashable, generation: Generation) -> Future[bool]:
        """Compute a generation's prompt in idle time; False where the engine has requests, or too much of this waits.

        It replaces an earlier one of the same key, and gives way, part computed, to any generation that is submitted. Its
        token is of no interest.
        """
        return self._inbox.ask(lambda: self._enter_background(key, generation))

    def drop_ahead(self, key: Hashable) -> Future[bool]:
        """Stop computing ahead for `key`; whether it was still being computed. What is done stays in the cache."""
        return self._inbox.ask(lambda: self._background.drop(key))

    # ---- in the engine's thread ------------------------------------------------------------------------------------

    def _enter(self, generation: Generation, sampler: Sampler) -> None:
        self._background.drop_all()
        self._roster.enter(generation, sampler)

    def _enter_background(self, key: Hashable, generation: Generation) -> bool:
        if self._roster.is_closed or not self._background.put(key, generation):
            return False
        self._roster.enter(generation, Sampler(self._model, GREEDY))
        return True
