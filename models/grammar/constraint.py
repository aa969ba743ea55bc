"""One answer's place in its grammar: the tokens that may come next."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

import numpy as np
from llguidance import LLMatcher

from .tokens import Tokens

MOST_FORCED = 256  # tokens at once: more only come a step later
CEILINGS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
CEILINGS = CEILINGS.astype(np.float32)
"""Of the logits of eight tokens, for each byte of a mask: five times as fast as picking the tokens out."""

SLOW = 0.05  # seconds that a step may wait for a mask
PATIENCE = 1.0  # seconds beyond that, for all masks of an answer together


class Constraint:
    """Belongs to the thread that chooses tokens; only `compute` runs in another one, and the next call waits for it.

    error: why the answer cannot go on; empty as long as it can. fast_forward: tokens may be forced, not only allowed.
    has_controls: the answer may have control tokens.
    """

    def __init__(self, matcher: LLMatcher, tokens: Tokens, *, fast_forward: bool, has_controls: bool) -> None:
        self.error = ""
        self._matcher, self._tokens, self._fast_forward = matcher, tokens, fast_forward
        self._has_controls = has_controls
        self._mask = np.zeros((tokens.num_vocab + 31) // 32, np.int32)  # a bit for each token
        self._is_computed = False
        self._computing: Future[None] | None = None
        self._waited = 0.0
        self._forced = self._find_forced()

    def compute(self) -> None:
        """Compute the mask of the next token, without the interpreter's lock."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if not self._has_controls:  # a complement in a client's grammar, `~/a/`, fits them
            np.bitwise_and(self._mask, self._tokens.texts, out=self._mask)
        self._is_computed = True

    def apply(self, logits: np.ndarray) -> bool:
        """Set the logits (vocabulary,), float32, of all tokens that do not fit to minus infinity.

        Return whether any is left. If none is, and the answer may not end here either, `error` says so.
        """
        self._settle()
        if not self._is_computed:
            self.compute()
        self._check()
        ceilings = CEILINGS.take(self._mask.view(np.uint8), axis=0)  # much faster than indexing
        np.minimum(logits, ceilings.reshape(-1)[: len(logits)], out=logits)
        fits = bool(logits.max() > -np.inf)
        if not fits and not self._allows_end:
            self.error = self.error or "the grammar allows only tokens that logit_bias or ignore_eos forbids"
        return fits

    @property
    def needs_mask(self) -> bool:
        """Whether no thread has computed the mask of the next token, nor is about to."""
        return not self._is_computed and self._computing is None

    def await_mask(self, computing: Future[None]) -> None:
        """Note the work that computes the mask."""
        self._computing = computing

    @property
    def _allows_end(self) -> bool:
        ends = self._tokens.ends
        return bool((self._mask[ends >> 5] >> (ends & 31) & 1).any())

    def accept(self, *tokens: int) -> None:
        """Go on behind tokens, and then as far as only one text fits."""
        self._settle()
        self._is_computed = False
        if not self.error and not all(map(self._matcher.consume_token, tokens)):
            self._check()
        self._forced = self._find_forced()

    def first_forced(self) -> int | None:
        """Return the next token that must come next; None if there is a choice."""
        return self._forced.pop(0) if self._forced else None

    @property
    def has_forced(self) -> bool:
        """Whether the next token must be a certain one."""
        return bool(self._forced)

    def take_forced(self) -> list[int]:
        """Return the tokens that must come next. Where nothing more fits, the last one ends the answer."""
        forced, self._forced = self._forced, []
        return forced

    def _find_forced(self) -> list[int]:
        if not self._fast_forward or self.error:
            return []
        forced = [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()[:MOST_FORCED]
        if forced:
            forced = forced[: self._matcher.try_consume_tokens(forced)]
        self._check()
        if self._matcher.is_stopped() and not self.error:
            forced.append(int(self._tokens.ends[0]))
        return forced

    def _settle(self) -> None:
        """Wait for the other thread."""
        if self._computing is None:
            return
        began = perf_counter()
        self._computing.result()
        self._computing = None
        self._waited += max(perf_counter() - began - SLOW, 0.0)

    def _check(self) -> None:
        if self._waited > PATIENCE:
            self.error = "the grammar takes too long at each token: make it simpler"
        elif self._matcher.is_error():
            dead = "NoExtension" in self._matcher.get_error()
            self.error = "no token of this model fits the grammar here" if dead else "the grammar became too complex"


def compute_masks(constraints: Sequence[Constraint], executor: ThreadPoolExecutor) -> None:
    """Let another thread compute the masks that are not computed yet, one after the other."""
    if missing := [one for one in constraints if one.needs_mask]:
        computing = executor.submit(_compute_all, missing)
        for constraint in missing:
            constraint.await_mask(computing)


def _compute_all(constraints: Sequence[Constraint]) -> None:
    for constraint in constraints:
        constraint.compute()
