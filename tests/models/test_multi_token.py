"""A multi-token head on the real engine: it reads the states of the tokens that were accepted, wherever they come from."""

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from slotcache.models import context as contexts
from slotcache.models import multi_token
from slotcache.models.context import Context
from slotcache.models.draft_model import Best
from slotcache.models.errors import ModelError
from slotcache.models.model import Model
from slotcache.models.multi_token import head_settings, open_head, why_unused
from slotcache.models.runner import Runner
from slotcache.slots.plan import Plan, Share, Span
from slotcache.slots.scope import Scope
from support.architectures import delta, with_head

from .test_draft_model import SCOPE, SETTINGS, TEXT, ask, grow, running

SHAPE = replace(SETTINGS, gives_states=True, rollback=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory, request):
    folder, is_hybrid = tmp_path_factory.mktemp("models"), getattr(request, "param", "") == "hybrid"
    path = delta(folder / "hybrid.gguf", heads=1) if is_hybrid else with_head(folder / "head.gguf", "all")
    with closing(Model(path, with_heads=True)) as model:
        yield model


@pytest.fixture(scope="module")
def runner(model):
    with closing(Context(model, SHAPE)) as context:
        yield Runner(context)


@pytest.fixture
def head(runner):
    runner.clear()
    with closing(open_head(runner, SHAPE, num_slots=3)) as head:
        head.warm_up()
        yield head


def compute(head, job, start, tokens):
    """Let the served model compute tokens of a request. Its sequences here are its slots."""
    served = Runner(head._served)
    served.on_computed = head._note
    span = Span(job.request.id, job.slot, start, np.array(tokens, np.int32), logits=False)
    served._remove(job.slot, start, -1)
    served.run(Plan((), (span,)))


def afresh(model, tokens, *, first=0, most=3, states=None):
    """Return what a head says behind these tokens that has read those from a position on, with the model's own states."""
    tokens = np.array(tokens, np.int32)
    with closing(Context(model, SHAPE)) as served, closing(Context(model, head_settings(SHAPE, 3))) as context:
        runner, own, best = Runner(served), Runner(context), Best(model, model.num_vocab)
        runner.run(Plan((), (Span(0, 0, 0, tokens[:-1], logits=False),)))
        states = np.concatenate([np.zeros((1, 128), np.float32), served.states(len(tokens) - 1)])[first:].copy()
        if first:
            states[0] = 0
        found, at, feed = [], first, tokens[first:]
        while len(found) < most:
            own.batch.states[: len(feed)] = states
            found += own.run(Plan((), (Span(0, 0, at, feed, logits=True),)), {0: best})
            at += len(feed)
            states, feed = context.states(len(feed))[-1:].copy(), np.array(found[-1:], np.int32)
        return found


@pytest.mark.parametrize("model", ["glm", "hybrid"], indirect=True)
def test_it_says_what_it_would_say_afresh(head, model):
    job = running(1, 0, TEXT[:21])
    compute(head, job, 0, TEXT[:9])
    compute(head, job, 9, TEXT[9:20])
    assert head.lacking(job) == 20
    (first,) = ask(head, job, most=3)
    assert first == afresh(model, TEXT[:21])
    assert len({*first, *afresh(model, TEXT[1:21]), *afresh(model, [5, *TEXT[1:21]])}) > 5, "the test tells nothing"
    compute(head, job, 20, [TEXT[20], *first])  # of the drafts, one is right
    grow(job, first[0], 77)
    assert head.lacking(job) == 1, "what was drafted by a guessed state is read again"
    assert ask(head, job, most=3)[0] == afresh(model, job.tokens[: job.num_tokens])
    compute(head, job, 22, [77, 5, 6, 7])  # none is
    grow(job, 78)
    assert ask(head, job, most=3)[0] == afresh(model, job.tokens[: job.num_tokens])
    compute(head, job, 23, [78])
    compute(head, job, 24, [79])  # steps without drafts
    grow(job, 79, 80)
    assert ask(head, job, most=3)[0] == afresh(model, job.tokens[: job.num_tokens])


@pytest.mark.parametrize("model", ["glm", "hybrid"], indirect=True)
def test_streams_do_not_mix(head, model):
    jobs = [running(number, number, TEXT[number : 20 + 3 * number]) for number in range(3)]
    for job in jobs:
        compute(head, job, 0, job.tokens[: job.num_tokens - 1])
    assert ask(head, *jobs, most=3) == [afresh(model, job.tokens[: job.num_tokens]) for job in jobs]


def test_states_that_are_not_the_last_ones_are_of_no_use(head, model):
    """The request has come by the KV behind them otherwise."""
    job = running(1, 0, TEXT[:21])
    compute(head, job, 0, TEXT[:9])
    assert head.lacking(job) == 0
    assert ask(head, job, most=3)[0] == afresh(model, TEXT[:21], first=20)


def test_a_next_turn_goes_on_from_the_states_of_the_last_one(head, model, runner):
    """Some tokens of the last turn were read, some not; the rest is the new request's own."""
    first = running(1, 0, TEXT[:21])
    compute(head, first, 0, TEXT[:20])
    ask(head, first, most=1)
    compute(head, first, 20, TEXT[20:26])
    second = running(2, 1, TEXT[:41], cached=24)
    for slot in (1, 2):
        runner.apply(Share(0, slot, 0, 24))
    compute(head, second, 24, TEXT[24:40])
    assert head.lacking(second) == 40 - 21
    assert ask(head, second, most=3)[0] == afresh(model, TEXT[:41])
    third = running(3, 2, TEXT[:41], cached=24, scope=Scope.shared("b"))
    compute(head, third, 24, TEXT[24:40])
    assert head.lacking(third) == 40 - 24, "another scope's states are not its own"


def test_where_nothing_reports_the_states_it_begins_there(head, model):
    """KV that came from host memory or from disk: the head reads what the model computed behind it."""
    job = running(1, 0, TEXT[:41], cached=24)
    compute(head, job, 0, TEXT[:24])
    head._trails.clear()
    compute(head, job, 24, TEXT[24:40])
    assert head.lacking(job) == 40 - 24
    assert ask(head, job, most=3)[0] == afresh(model, TEXT[:41], first=24)
    lost = running(2, 1, TEXT[:41])
    compute(head, lost, 0, TEXT[:40])
    head._trails.clear()
    assert head.lacking(lost) == 0
    assert ask(head, lost, most=3)[0] == afresh(model, TEXT[:41], first=40)


def test_other_tokens_in_front_are_not_its_own(head, model):
    other = running(1, 0, [7, *TEXT[1:30]])
    compute(head, other, 0, other.tokens[:29])
    ask(head, other)
    job = running(2, 1, TEXT[:41], cached=24)  # as if the cache had it from elsewhere
    compute(head, job, 0, TEXT[:24])
    head._trails.pop(2)
    compute(head, job, 24, TEXT[24:40])
    assert ask(head, job, most=3)[0] == afresh(model, TEXT[:41], first=24)


def test_a_scope_that_is_forgotten_leaves_no_states(head, model):
    job = running(1, 0, TEXT[:21])
    compute(head, job, 0, TEXT[:20])
    ask(head, job)
    head.forget(SCOPE)
    assert not head._trails and not any(kept.length for kept in head._kept)
    compute(head, job, 20, TEXT[20:30])
    grow(job, *TEXT[21:31])
    assert ask(head, job, most=3)[0] == afresh(model, TEXT[:31], first=20)


def test_states_take_bounded_memory(head, model, monkeypatch):
    monkeypatch.setattr(multi_token, "MOST_BYTES", 16 * 128 * 4)
    job = running(1, 0, TEXT[:41])
    for start in range(40):
        compute(head, job, start, TEXT[start : start + 1])
        assert sum(trail.num_bytes for trail in head._trails.values()) <= multi_token.MOST_BYTES
    assert head.lacking(job) == 16
    assert ask(head, job, most=3)[0] == afresh(model, TEXT[:41], first=24)
    for number in range(2, 30):
        compute(head, running(number, 1, TEXT[:3]), 0, TEXT[:2])
    assert len(head._trails) <= 6
    compute(head, running(30, 2, TEXT[:41]), 0, TEXT[:40])
    assert len(head._trails) == 1, "a single piece may be larger: the next step's takes its place"


def test_states_of_rejected_tokens_are_freed():
    trail = multi_token.Trail(0, 0)
    trail.append(0, TEXT[:8], np.zeros((8, 4), np.float32))
    trail.cut(3)
    ((_, states),) = trail.pieces
    assert states.base is None and trail.num_bytes == states.nbytes == 3 * 16


def test_a_long_prompt_does_not_take_the_states_of_others(head, model, monkeypatch):
    monkeypatch.setattr(multi_token, "MOST_BYTES", 20 * 128 * 4)
    short, long = running(1, 0, TEXT[:9]), running(2, 1, TEXT[:41])
    for start in range(0, 8, 2):
        compute(head, short, start, TEXT[start : start + 2])
    for start in range(0, 40, 4):
        compute(head, long, start, TEXT[start : start + 4])
    assert (head.lacking(short), head.lacking(long)) == (8, 12)
    assert ask(head, short, most=3)[0] == afresh(model, TEXT[:9])


def test_an_idle_slot_is_read_ahead(head, model):
    job = running(1, 0, TEXT[:21])
    compute(head, job, 0, TEXT[:40])
    slot = SimpleNamespace(id=0, last=1, scope=SCOPE, history=TEXT[:40])
    assert head.read_ahead(slot, 36, 30) and head.read_ahead(slot, 36, 30) and not head.read_ahead(slot, 36, 30)
    later = running(2, 0, TEXT[:41], cached=36)
    compute(head, later, 36, TEXT[36:40])
    assert head.lacking(later) == 4
    assert ask(head, later, most=3)[0] == afresh(model, TEXT[:41])
    slot.last = 9
    assert not head.read_ahead(SimpleNamespace(id=1, last=9, scope=SCOPE, history=TEXT[::-1].copy()), 36, 30)


def test_what_cannot_draft_says_why(tmp_path, tiny, monkeypatch):
    def why(path):
        with closing(Model(path)) as model:
            return why_unused(model)

    assert why(tiny) == "its file has none"
    path = with_head(tmp_path / "head.gguf")
    assert why(path) == ""
    assert "each would need KV of its own" in why(with_head(tmp_path / "two.gguf", heads=2))
    without = with_head(tmp_path / "without.gguf", heads=0)
    assert why(without) == "its file's metadata names one, but the file lacks its tensors"
    monkeypatch.setattr(multi_token, "ARCHITECTURES", ("other",))
    assert why(path) == "those of glm4moe were never tried here, but of other"


def test_a_library_that_reports_no_states_is_refused(model, monkeypatch):
    monkeypatch.setattr(contexts, "GIVE_STATES", "llama_of_another_day")
    with pytest.raises(ModelError, match="has no llama_of_another_day, so it reports no hidden states: --spec-type none"):
        Context(model, SHAPE)
