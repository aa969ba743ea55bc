"""Constrained decoding: compiles grammars, and masks the tokens that a grammar does not allow."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock, stack_size
from time import perf_counter, thread_time

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from . import llama
from .json_schema import LIMITS, MAX_BYTES, GrammarError, GrammarSource, TrialProcess, check
from .model import Model

# ---- A model's vocabulary in llguidance's form. -------------------------------------------------------------------------

CONTROL = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNKNOWN


class Tokens:
    """A vocabulary in llguidance's form: each token as the bytes that it adds to a text.

    Control tokens have no bytes in a text, so a grammar allows a control token only if it names the token. User-defined
    tokens, such as `<think>` in many vocabularies, are like any other text. If a grammar allows only one text, the model's
    tokenizer cuts this text into tokens.

    ends: the ids of the tokens that end an answer.
    texts: a mask with a bit for each token. A token's bit is set if the token has bytes in a text, or ends an answer.
    """

    def __init__(self, model: Model) -> None:
        if not model.ends:
            raise GrammarError("this model has no token that ends an answer")
        self.num_vocab, self.ends = model.num_vocab, np.array(sorted(model.ends), np.intp)
        attributes = (llama.llama_vocab_get_attr(model.vocab, token) for token in range(model.num_vocab))
        controls = [token for token, attribute in enumerate(attributes) if attribute & CONTROL]
        self.texts = ~_mask(set(controls) - model.ends, model.num_vocab)
        tokens = [model.piece(token) for token in range(model.num_vocab)]
        for token in controls:
            tokens[token] = model.text_of(token).encode() or b"<>"
        self.tokenizer = LLTokenizer(TokenizerWrapper(_Cutter(model, tokens, controls)), eos_token=sorted(model.ends))


class _Cutter:
    """A tokenizer in llguidance's form."""

    bos_token_id = None

    def __init__(self, model: Model, tokens: list[bytes], special_token_ids: list[int]) -> None:
        self.tokens, self.special_token_ids = tokens, special_token_ids
        self.eos_token_id = min(model.ends)
        self._model = model

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("a text is wanted")  # llguidance tries bytes first
        return self._model.tokenize(text).tolist()


def _mask(tokens: Collection[int], num_vocab: int) -> np.ndarray:
    """Return a mask, (vocabulary / 32,), int32, with a bit for each token. The bits of `tokens` are set."""
    bits = np.zeros(-(-num_vocab // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


MOST_FORCED = 256  # forced tokens at once; further ones follow in the next step
CEILINGS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
CEILINGS = CEILINGS.astype(np.float32)
"""By a byte of a mask, the highest values that its eight logits may have. This is five times as fast as indexing."""

SLOW = 0.05  # seconds that a step may wait for a mask
PATIENCE = 1.0  # seconds beyond that, for all masks of an answer together


class Constraint:
    """The tokens that a grammar allows in one answer.

    A constraint belongs to the thread that chooses tokens. Only `compute` may run in another thread. `apply` and `accept`
    wait until `compute` has finished.

    error: why the answer cannot continue; empty while it can.
    fast_forward: if the grammar allows only one continuation, append its tokens without sampling ("forced" tokens).
    has_controls: the answer may have control tokens.
    """

    def __init__(self, matcher: LLMatcher, tokens: Tokens, *, fast_forward: bool, has_controls: bool) -> None:
        self.error = ""
        self._matcher, self._tokens, self._fast_forward = matcher, tokens, fast_forward
        self._has_controls = has_controls
        self._mask = np.zeros((tokens.num_vocab + 31) // 32, np.int32)  # a bit for each token
        self._is_computed = False
        self._computing: Future[None] | None = None
        self._waited = self._spent = 0.0  # seconds waited for all masks; seconds of processor time for the newest mask
        self._forced = self._find_forced()

    def compute(self) -> None:
        """Compute the mask of the next token, without Python's global lock."""
        began = thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if not self._has_controls:  # control tokens would match a complement such as `~/a/` in a client's grammar
            np.bitwise_and(self._mask, self._tokens.texts, out=self._mask)
        self._spent, self._is_computed = thread_time() - began, True

    def apply(self, logits: np.ndarray) -> bool:
        """Set the logits of all tokens that the grammar forbids to minus infinity. Return whether any token remains.

        If no token remains, and the grammar does not allow the answer to end here, set `error`.

        logits: (vocabulary,), float32.
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
        """Whether the mask of the next token is neither computed nor being computed."""
        return not self._is_computed and self._computing is None

    def await_mask(self, computing: Future[None]) -> None:
        """Store the future of a running computation of the mask."""
        self._computing = computing

    @property
    def _allows_end(self) -> bool:
        ends = self._tokens.ends
        return bool((self._mask[ends >> 5] >> (ends & 31) & 1).any())

    def accept(self, *tokens: int) -> None:
        """Add chosen tokens, then find the tokens that the grammar forces after them."""
        self._settle()
        self._is_computed = False
        if not self.error and not all(map(self._matcher.consume_token, tokens)):
            self._check()
        self._forced = self._find_forced()

    def first_forced(self) -> int | None:
        """Remove and return the next forced token; None if the grammar allows a choice."""
        return self._forced.pop(0) if self._forced else None

    @property
    def has_forced(self) -> bool:
        """Whether the next token is forced."""
        return bool(self._forced)

    def take_forced(self) -> list[int]:
        """Remove and return the forced tokens.

        If the grammar allows nothing after the forced tokens, the last of them ends the answer.
        """
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
        """Wait for the thread that computes the mask, and count the wait toward PATIENCE.

        The counted time is at most the processor time that this mask took. A busy machine or the masks of other answers
        therefore do not count toward PATIENCE.
        """
        if self._computing is None:
            return
        began = perf_counter()
        self._computing.result()
        self._computing = None
        self._waited += max(min(perf_counter() - began, self._spent) - SLOW, 0.0)

    def _check(self) -> None:
        if self._waited > PATIENCE:
            self.error = "the grammar takes too long at each token: make it simpler"
        elif self._matcher.is_error():
            dead = "NoExtension" in self._matcher.get_error()
            self.error = "no token of this model fits the grammar here" if dead else "the grammar became too complex"


def compute_masks(constraints: Sequence[Constraint], executor: ThreadPoolExecutor) -> None:
    """Let a thread of `executor` compute the missing masks, one after the other."""
    if missing := [one for one in constraints if one.needs_mask]:
        computing = executor.submit(_compute_all, missing)
        for constraint in missing:
            constraint.await_mask(computing)


def _compute_all(constraints: Sequence[Constraint]) -> None:
    for constraint in constraints:
        constraint.compute()


# ---- Compiles grammars, and keeps the compiled ones. --------------------------------------------------------------------
#
# The format of a chat with tool calls is written in Lark. Its marks are written as in the vocabulary: as a control token, by
# id, or as a text. Free text ends by itself before a control token. A rule that ends with a text needs `[lazy]`:
#
#     start: (before call)+                                   start: TEXT? (<[7]> call)+
#     before[lazy]: /(.|\n)*/ "<tool_call>"                   TEXT: /(.|\n)+/
#     call: "{\"name\": \"add\", \"arguments\": " @add "}" "</tool_call>"
#
# with GrammarSource(kind="lark", text=..., schemas=(("add", '{"type": "object", ...}'),), may_name_tokens=True).

STACK = 64 << 20  # bytes, four times the stack of the trial: a grammar that compiles there also compiles here
KEPT = 128 << 20  # most bytes of all kept grammars
FIXED_BYTES, BYTES_A_CHARACTER = 64 << 10, 400  # size of a compiled grammar, measured


class Grammar:
    """A compiled grammar.

    num_bytes: its approximate size.
    has_controls: its answers may have control tokens.
    left_out: the parts of its schemas that it does not enforce.
    """

    def __init__(
        self, matcher: LLMatcher, tokens: Tokens, num_bytes: int, *, has_controls: bool, left_out: tuple[str, ...] = ()
    ) -> None:
        self.num_bytes, self.left_out = num_bytes, left_out
        self._matcher, self._tokens, self._has_controls = matcher, tokens, has_controls

    def start(self, *, fast_forward: bool = True) -> Constraint:
        """Return the constraint of a new answer."""
        matcher, has_controls = self._matcher.deep_copy(), self._has_controls
        return Constraint(matcher, self._tokens, fast_forward=fast_forward, has_controls=has_controls)


class Grammars:
    """Compiles grammars in a separate thread, one after the other, and keeps the compiled grammars.

    Before the first grammar, the thread reads the vocabulary. Safe from several threads. Call `close` before the model is
    closed.

    num_waiting: the number of unfinished compilations.
    """

    def __init__(self, model: Model) -> None:
        self._thread = _deep_thread()
        self._tokens = self._thread.submit(Tokens, model)
        self._trial = TrialProcess()
        self._kept: OrderedDict[GrammarSource, Grammar] = OrderedDict()  # the least recently used first
        self._num_bytes = 0  # size of all kept grammars
        self._lock = Lock()  # guards the kept grammars
        self.num_waiting = 0

    def compile(self, source: GrammarSource) -> Future[Grammar]:
        """Return a future of the compiled grammar.

        If this grammar was compiled before and is kept, the future is already done. The future may raise GrammarError.
        """
        if found := self._find(source):
            done: Future[Grammar] = Future()
            done.set_result(found)
            return done
        with self._lock:
            self.num_waiting += 1
        compiling = self._thread.submit(self._compile, source)
        compiling.add_done_callback(self._count_done)
        return compiling

    def close(self) -> None:
        """Wait for the running compilation, and cancel all waiting compilations."""
        self._thread.shutdown(cancel_futures=True)
        self._trial.close()

    def _find(self, source: GrammarSource) -> Grammar | None:
        with self._lock:
            if source in self._kept:
                self._kept.move_to_end(source)
            return self._kept.get(source)

    def _count_done(self, compiling: Future[Grammar]) -> None:
        with self._lock:
            self.num_waiting -= 1

    # ---- in its thread ---------------------------------------------------------------------------------------------

    def _compile(self, source: GrammarSource) -> Grammar:
        if found := self._find(source):  # an earlier call has compiled it
            return found
        if source.size > MAX_BYTES:
            raise GrammarError(f"it has {source.size:,} characters: expected at most {MAX_BYTES:,}")
        definition, left_out = self._trial.define(source)
        matcher = LLMatcher(self._tokens.result().tokenizer, definition, log_level=0, limits=LIMITS)
        check(matcher)
        num_bytes = FIXED_BYTES + BYTES_A_CHARACTER * len(definition)
        grammar = Grammar(matcher, self._tokens.result(), num_bytes, has_controls=source.may_name_tokens, left_out=left_out)
        self._keep(source, grammar)
        return grammar

    def _keep(self, source: GrammarSource, grammar: Grammar) -> None:
        with self._lock:
            self._kept[source] = grammar
            self._num_bytes += grammar.num_bytes
            while self._num_bytes > KEPT:
                _, dropped = self._kept.popitem(last=False)
                self._num_bytes -= dropped.num_bytes


def _deep_thread() -> ThreadPoolExecutor:
    """Return an executor of one thread with a large stack, since grammars may be nested."""
    usual = stack_size(STACK)
    try:
        executor = ThreadPoolExecutor(1, "grammars")
        executor.submit(int).result()  # starts the thread
    finally:
        stack_size(usual)
    return executor
