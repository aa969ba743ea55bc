"""Measures how long prompts wait for their first token.

If an engine does not report cached tokens, their number is guessed from the wait for the first token.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from statistics import median
from time import perf_counter

SAMPLES = 15  # the newest waits of a model, whose median is its speed
LEAST = 3  # waits that have to be known before a wait is judged
MOST_MODELS = 16  # models whose speeds are kept
SHARE = 1 / 3  # of a prompt: if less should be cached, the prompt counts as cold; if more, its wait is judged
MOST_SLOWER = 1.2  # times a cold prompt's time: a longer wait shows that earlier prompts were not cold


class Prefills:
    """The prompts that wait for their first token. For one event loop only.

    A wait counts only if the engine computes no other prompt at the same time.

    clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self.num_waiting = self.num_started = 0
        self.warming: Counter[bytes] = Counter()  # prompts of `num_waiting` that no client waits for, by model

    def begin(self) -> Prefill:
        """Begin to measure the wait of a client's prompt, which is sent now."""
        return Prefill(self)

    def begin_warming(self, model: bytes) -> Prefill:
        """Begin to measure the wait of a warm-up, which is sent now."""
        self.warming[model] += 1
        return Prefill(self, model)

    def has_time_for(self, model: bytes) -> bool:
        """Return whether a warm-up of this model can start without delaying a client.

        A warm-up delays no client if all waiting prompts are warm-ups of other models.
        """
        return self.num_waiting == self.warming.total() - self.warming[model]


class Prefill:
    """A prompt that the upstream computes.

    seconds: the wait for the first token; None if no token came, or if other prompts waited at the same time.
    warms: the model for which a warm-up is sent; None for the prompt of a client.
    """

    def __init__(self, prefills: Prefills, warms: bytes | None = None) -> None:
        self.seconds: float | None = None
        self._prefills, self._warms, self._is_waiting = prefills, warms, True
        self._is_first = not prefills.num_waiting
        prefills.num_waiting += 1
        prefills.num_started += 1
        self._number, self._began = prefills.num_started, prefills.clock()

    def token(self) -> None:
        """Record that a token has come. Only the prompt's first token can set `seconds`."""
        if self._is_waiting and self._is_first and self._prefills.num_started == self._number:
            self.seconds = self._prefills.clock() - self._began
        self.end()

    def end(self) -> None:
        """End the wait for the first token, whether it has come or not."""
        self._prefills.num_waiting -= self._is_waiting
        if self._is_waiting and self._warms is not None:
            self._prefills.warming -= Counter([self._warms])  # drops models without prompts
        self._is_waiting = False


class PrefillSpeeds:
    """The prefill time of each model, in seconds per token, learnt from prompts of which little was expected to be cached.

    The time is a median, so that a single wait with another cause changes nothing.
    """

    def __init__(self) -> None:
        self._waits: OrderedDict[bytes, deque[float]] = OrderedDict()  # seconds per token, by the model's name

    def cached(self, model: bytes, tokens: int, expected: int, seconds: float) -> int | None:
        """Estimate how many of a prompt's tokens were cached. If the number is unknown, or about as expected, return None.

        A prompt is cold if little of it was expected to be cached: its wait shows the model's speed. A prompt that is not
        cold should take less time than a cold one. If the wait of a prompt is nearer to the time of a cold prompt than to
        the expected time, less was cached than expected (CacheWeaver, 3.4).

        If a wait is clearly longer than the time of a cold prompt, the prompts that seemed cold were partly cached: a new
        front cannot know what a warm engine has cached. So a wait that is clearly longer than that of a cold prompt corrects
        the model's speed.

        expected: the number of tokens that were expected to be cached.
        seconds: the wait for the first token.
        """
        waits = self._waits.setdefault(model, deque(maxlen=SAMPLES))
        self._waits.move_to_end(model)
        while len(self._waits) > MOST_MODELS:
            self._waits.popitem(last=False)
        computed = tokens - expected
        if expected < SHARE * tokens:
            waits.append(seconds / computed)
            return None
        if len(waits) < LEAST:
            return None
        took = seconds / max(median(waits), 1e-9)
        if took > MOST_SLOWER * tokens:
            waits.append(seconds / computed)
            return None
        return max(round(tokens - took), 0) if took > computed + expected / 2 else None
