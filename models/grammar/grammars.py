r"""Compiles grammars, and keeps the compiled ones.

The format of a chat that calls functions is written in Lark. `marker` gives each of its marks as the vocabulary has it, a
control token or a text. Free text ends in front of a control token by itself; a rule that ends with a text needs `[lazy]`:

    start: (before call)+                                   start: TEXT? (<[7]> call)+
    before[lazy]: /(.|\n)*/ "<tool_call>"                   TEXT: /(.|\n)+/
    call: "{\"name\": \"add\", \"arguments\": " @add "}" "</tool_call>"

with Source(kind="lark", text=..., schemas=(("add", '{"type": "object", ...}'),), may_name_tokens=True).
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock, stack_size

from llguidance import LLMatcher

from ..model import Model
from .constraint import Constraint
from .definition import LIMITS
from .process import TrialProcess
from .source import MAX_BYTES, GrammarError, Source
from .tokens import Tokens
from .trial import check

STACK = 64 << 20  # bytes, four times as many as in the trial: a grammar that compiles there compiles here
KEPT = 128 << 20  # bytes of compiled grammars that are kept
FIXED_BYTES, BYTES_A_CHARACTER = 64 << 10, 400  # of a compiled grammar, as measured


class Grammar:
    """A compiled grammar. num_bytes: about what it takes. has_controls: its answers may have control tokens."""

    def __init__(self, matcher: LLMatcher, tokens: Tokens, num_bytes: int, *, has_controls: bool) -> None:
        self.num_bytes = num_bytes
        self._matcher, self._tokens, self._has_controls = matcher, tokens, has_controls

    def start(self, *, fast_forward: bool = True) -> Constraint:
        """Return the beginning of one answer."""
        matcher, has_controls = self._matcher.deep_copy(), self._has_controls
        return Constraint(matcher, self._tokens, fast_forward=fast_forward, has_controls=has_controls)


class Grammars:
    """Compiles in a thread of its own, one grammar after the other. The vocabulary is read there first, at once.

    Safe from several threads. num_waiting: compilations that are not done yet. Call `close` before the model is closed.
    """

    def __init__(self, model: Model) -> None:
        self._thread = _deep_thread()
        self._tokens = self._thread.submit(Tokens, model)
        self._trial = TrialProcess()
        self._kept: OrderedDict[Source, Grammar] = OrderedDict()  # the least recently used first
        self._num_bytes = 0  # of the kept ones
        self._lock = Lock()  # of the kept ones
        self.num_waiting = 0

    def compile(self, source: Source) -> Future[Grammar]:
        """Compile a grammar, or find it at once. The future raises GrammarError."""
        if found := self._find(source):
            done: Future[Grammar] = Future()
            done.set_result(found)
            return done
        with self._lock:
            self.num_waiting += 1
        compiling = self._thread.submit(self._compile, source)
        compiling.add_done_callback(self._count_done)
        return compiling

    def marker(self, text: str) -> str:
        """Return a piece of Lark for a mark in a chat's format: see `Tokens.marker`. Waits for the vocabulary."""
        return self._tokens.result().marker(text)

    def close(self) -> None:
        """Wait for the compilation that runs; drop those that wait."""
        self._thread.shutdown(cancel_futures=True)
        self._trial.close()

    def _find(self, source: Source) -> Grammar | None:
        with self._lock:
            if source in self._kept:
                self._kept.move_to_end(source)
            return self._kept.get(source)

    def _count_done(self, compiling: Future[Grammar]) -> None:
        with self._lock:
            self.num_waiting -= 1

    # ---- in its thread ---------------------------------------------------------------------------------------------

    def _compile(self, source: Source) -> Grammar:
        if found := self._find(source):  # it was asked for twice
            return found
        if source.size > MAX_BYTES:
            raise GrammarError(f"it has {source.size:,} characters: expected at most {MAX_BYTES:,}")
        definition = self._trial.define(source)
        matcher = LLMatcher(self._tokens.result().tokenizer, definition, log_level=0, limits=LIMITS)
        check(matcher)
        num_bytes = FIXED_BYTES + BYTES_A_CHARACTER * len(definition)
        grammar = Grammar(matcher, self._tokens.result(), num_bytes, has_controls=source.may_name_tokens)
        self._keep(source, grammar)
        return grammar

    def _keep(self, source: Source, grammar: Grammar) -> None:
        with self._lock:
            self._kept[source] = grammar
            self._num_bytes += grammar.num_bytes
            while self._num_bytes > KEPT:
                _, dropped = self._kept.popitem(last=False)
                self._num_bytes -= dropped.num_bytes


def _deep_thread() -> ThreadPoolExecutor:
    """Return one thread with a large stack: grammars may be nested."""
    usual = stack_size(STACK)
    try:
        executor = ThreadPoolExecutor(1, "grammars")
        executor.submit(int).result()  # starts the thread
    finally:
        stack_size(usual)
    return executor
