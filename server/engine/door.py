"""The way into the engine for generations, and the way out before their end."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import Future

from ...models.model import Model
from ...models.sampling import GREEDY, Sampler
from .engine import Engine
from .generation import Generation


class Door:
    """For the event loop's thread. Acts run after the engine's current step; two of them end a background step early."""

    def __init__(self, engine: Engine, model: Model) -> None:
        self._inbox, self._roster, self._background = engine.inbox, engine.roster, engine.background
        self._interrupt, self._model = engine.runner.interrupt, model

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue generations, all of them or none. Raises RequestError once the engine is stopped.

        The samplers are made here: bad parameters must fail in the caller's thread, not in the engine's.
        """
        samplers: list[Sampler] = []
        try:
            for generation in generations:
                samplers.append(Sampler(self._model, generation.sampling))
            if not self._inbox.put(lambda: self._enter(generations, samplers)):
                raise self._inbox.refusal()
        except Exception:
            for sampler in samplers:
                sampler.close()
            raise
        self._interrupt.set()

    def cancel(self, generation: Generation) -> Future[None]:
        """End a generation whose client has gone, before the next step. The future is done when the engine has ended it."""
        self._inbox.put(lambda: self._roster.end(generation))  # an error in it is a failed step, not the asker's
        return self._inbox.ask(lambda: None)

    def submit_background(self, key: Hashable, generation: Generation) -> Future[bool]:
        """Compute a generation's prompt in idle time. False: requests are open, or too many of these wait.

        It replaces an earlier one of the same key, and ends, part computed, when a generation is submitted. Its token is
        not used.
        """
        return self._inbox.ask(lambda: self._enter_background(key, generation))

    def drop_background(self, key: Hashable) -> Future[bool]:
        """End the background generation of `key`. True: it was not done yet. Its computed tokens stay in the cache."""
        dropped = self._inbox.ask(lambda: self._background.drop(key))
        self._interrupt.set()
        return dropped

    # ---- in the engine's thread ------------------------------------------------------------------------------------

    def _enter(self, generations: Sequence[Generation], samplers: Sequence[Sampler]) -> None:
        self._background.drop_all()
        for generation, sampler in zip(generations, samplers, strict=True):
            self._roster.enter(generation, sampler)

    def _enter_background(self, key: Hashable, generation: Generation) -> bool:
        if self._roster.is_closed or not self._background.put(key, generation):
            return False
        self._roster.enter(generation, Sampler(self._model, GREEDY))
        return True
