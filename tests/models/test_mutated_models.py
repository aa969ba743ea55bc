"""Damaged GGUF files and templates, by the hundred. SLOTCACHE_MUTATIONS=10000 tries 10,000 (with those of
tests/server/test_mutated_files.py)."""

import random
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from slotcache.models.jinja import Template, TemplateError
from slotcache.models.named_templates import DEFAULT_TEMPLATE
from slotcache.models.template import ChatTemplate
from support.mutation import cases, mutated

from models.test_chat import LLAMA, QWEN

SECONDS = 60  # that one template may take, on a busy machine
CHILD = Path(__file__).parents[1] / "support" / "damaged_models.py"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "<think>Well.</think>Hi", "tool_calls": []},
    {"role": "user", "content": "Bye"},
]
SNIPPETS = [
    *["{%", "%}", "{{", "}}", "{#", "|", "(", ")", "[", "]", ".", "-", "**", "*", "~", "'", "%"],
    *('"', "\n", "\\u12", " for x in messages ", " if ", " else ", "{% endfor %}", "{% endif %}", " loop ", " recursive "),
    *("9" * 30, "9" * 5000, "1e999", " range(99999) ", "{% for a in range(99999) %}", "|center(99999999999)", ".__class__"),
    *("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{% include 'x' %}", "{% import 'x' as y %}", "{% extends 'x' %}"),
    *("{% set messages = 5 %}", "|tojson", "|length", "(" * 500, "{% if 1 %}" * 60, "{% for a in messages %}" * 25),
]


class Hang(BaseException):
    """Something took too long: not an Exception, which a template's own errors are."""


@contextmanager
def limit(seconds):
    def end(*_):
        raise Hang

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def changed_template(source: bytes, chance: random.Random) -> str:
    for _ in range(chance.randint(1, 3)):
        if chance.random() < 0.6:
            at = chance.randrange(len(source) + 1)
            source = source[:at] + chance.choice(SNIPPETS).encode() + source[at:]
        else:
            source = mutated(source, chance)
    return source.decode("utf-8", "replace")


@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_a_damaged_template_gives_text_or_its_own_error():
    outcomes: Counter[str] = Counter()
    sources = [source.encode() for source in (DEFAULT_TEMPLATE, LLAMA, QWEN)]
    for number in range(cases(300, 0.2)):
        chance = random.Random(number)
        source = changed_template(chance.choice(sources), chance)
        with limit(SECONDS):
            try:
                ChatTemplate(source, "<s>", "</s>").pieces(MESSAGES)
                outcomes["text"] += 1
            except TemplateError:
                outcomes["refused"] += 1
            except Hang:
                raise AssertionError(f"case {number} hangs: {source!r}") from None
            except BaseException as error:
                raise AssertionError(f"case {number}: {type(error).__name__}: {source[:2000]!r}") from error
    assert outcomes["text"] and outcomes["refused"]


@pytest.mark.parametrize(
    "inner",
    [
        "{% for b in range(99999) %}{% endfor %}",
        "{% for b in range(99999) if false %}{% endfor %}",
        "{% for b in range(99999) %}{% set x = loop.index %}{% endfor %}",
        "{{ m() }}",
    ],
)
def test_a_template_that_computes_without_end_is_ended(inner):
    macro = "{% macro m() %}{% for c in range(99999) %}{% endfor %}{% endmacro %}"
    source = macro + "{% for a in range(99999) %}" + inner + "{% endfor %}"
    with limit(SECONDS), pytest.raises(TemplateError, match="more than 300000 steps"):
        Template(source).render({})


@pytest.mark.timeout(3600)
def test_a_damaged_model_is_refused_or_loaded(tiny, tmp_path):
    """In processes of their own, since llama.cpp ends a process over some of them; our own reading never does."""
    outcomes = Counter(_outcomes(tiny, tmp_path, cases(60, 0.1)))
    print("models:", dict(outcomes))
    assert not [outcome for outcome in outcomes if outcome.startswith("ours")], outcomes
    assert outcomes["refused"] or outcomes["loaded"]


def _outcomes(model, folder, count):
    """Return the outcome of each case: loaded, refused, or the way the process ended in llama.cpp."""
    number = 0
    while number < count:
        child = subprocess.run(
            [sys.executable, str(CHILD), str(model), str(folder), str(number), str(count)],
            capture_output=True,
            text=True,
            timeout=3000,
        )
        lines = [line for line in child.stdout.splitlines() if line.startswith("case ")]  # llama.cpp prints, too
        for line in lines:
            yield line.removeprefix("case ")
        number += len(lines)
        if number < count:
            assert child.returncode < 0, child.stderr[-2000:]  # a signal, not an exception of ours
            yield f"llama.cpp ended by {signal.Signals(-child.returncode).name}"
            number += 1
