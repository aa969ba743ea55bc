"""Compiles grammars in a process of its own, with limits of time, memory and depth.

A grammar of a few hundred bytes can take minutes, gigabytes, or more stack than a thread has, and llguidance cannot be
stopped. Here it only ends this process: the server refuses the grammar and starts another one.

Each line that comes is a source; each line that goes is llguidance's grammar for it, or the reason why it is refused.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from threading import Thread, stack_size

from llguidance import LLMatcher, LLTokenizer

from .definition import LIMITS, define, without_tokens
from .source import GrammarError, Source

SECONDS = 2.0  # of processor time, for one grammar
BYTES = 1 << 30  # of the process
STACK = 16 << 20  # a quarter of what the server compiles with
MOST_FORCED = 32 << 10  # bytes that every answer would begin with: the engine has to wait for their tokens
TOKEN = "<|tool|>"  # of the vocabulary here, whose other tokens are the bytes


def main() -> None:
    """Answer lines until there are no more."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    stack_size(STACK)
    worker = Thread(target=_answer_all, daemon=True)
    worker.start()
    worker.join()


def _answer_all() -> None:
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process, whatever it does
        answer = _answer(tokenizer, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def _answer(tokenizer: LLTokenizer, line: str) -> dict[str, str]:
    fields = json.loads(line)
    source = Source(**fields | {"schemas": tuple(map(tuple, fields["schemas"]))})
    try:
        grammar = define(source)
        tried = define(without_tokens(source, TOKEN)) if source.may_name_tokens else grammar
        check(LLMatcher(tokenizer, tried, log_level=0, limits=LIMITS))
    except GrammarError as error:
        return {"error": str(error)}
    except (ValueError, MemoryError, RecursionError) as error:
        return {"error": f"it cannot be compiled: {error}"}
    return {"grammar": grammar}


def check(matcher: LLMatcher) -> None:
    """Raise GrammarError for a grammar that did not compile, and for one that no answer fits."""
    if not matcher.is_error():
        if (forced := len(matcher.compute_ff_bytes())) > MOST_FORCED:
            raise GrammarError(f"it begins with a text of {forced:,} bytes: expected at most {MOST_FORCED:,}")
        matcher.compute_bitmask()
    if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
        raise GrammarError(_plain(matcher.get_error()) or "no answer fits it")


def _plain(error: str) -> str:
    """Return llguidance's message without its markers, on one line."""
    message = " ".join(error.replace("<non-verbose/>", "").split())
    return message if len(message) <= 300 else message[:300] + "..."
