"""A draft model on the real engine: its KV follows the tokens of each slot, and what it says is what it would say afresh."""

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from slotcache.bench.random_models import SHAPES, generate
from slotcache.models import draft_model
from slotcache.models.context import Context, ContextSettings
from slotcache.models.draft_model import TRIES, open_draft_model
from slotcache.models.errors import ModelError, RunnerError
from slotcache.models.model import Model
from slotcache.models.runner import Runner
from slotcache.models.timing import DeviceTiming
from slotcache.slots.job import Job
from slotcache.slots.request import Layout, Request
from slotcache.slots.reuse import Reuse, ReusedSpan
from slotcache.slots.scope import Scope
from slotcache.slots.slot import Slot
from support.architectures import hybrid, windowed
from support.on_device import HAS_OWN_KERNELS, NEAR

SETTINGS = ContextSettings(num_cells=512, batch=64, micro_batch=64, flash_attention="off", threads=1, num_sequences=8)
TEXT = np.arange(40, 100, dtype=np.int32)
SCOPE = Scope.shared("a")


@pytest.fixture(scope="module")
def served(tiny):
    with closing(Model(tiny)) as model, closing(Context(model, SETTINGS)) as context:
        yield context


def drafter_of(served, path, cells=512, slots=3):
    beside = Runner(served).interrupt
    return open_draft_model(Model(path), replace(SETTINGS, num_cells=cells), served.model, num_slots=slots, beside=beside)


@pytest.fixture
def drafter(served, tiny):
    with closing(drafter_of(served, tiny)) as drafter:
        drafter.warm_up()
        yield drafter


@pytest.mark.parametrize(("unit", "own", "share"), [(0.1, 1.0, 0.1), (1.0, 0.1, 10.0), (0.1, 0.2, 1.0), (1.0, 1.0, 1.0)])
def test_costs_of_a_timed_model_and_of_one_that_was_not_are_of_one_unit(served, tiny, unit, own, share, monkeypatch):
    """Else a draft model of a fast machine seems to take ten times as long as it does."""
    monkeypatch.setattr(draft_model, "learn_costs", lambda context, goes_on: setattr(context, "unit", own))
    more = {"num_slots": 3, "beside": Runner(served).interrupt}
    with closing(open_draft_model(Model(tiny), SETTINGS, served.model, unit=unit, **more)) as drafter:
        assert drafter.costs.pass_ns == pytest.approx(share * served.costs.pass_ns)


def running(number, slot, tokens, cached=0, scope=SCOPE):
    """A request that decodes, as far as a drafter looks at it."""
    request = Request(number, None, 100, scope)  # type: ignore[arg-type]
    job = SimpleNamespace(request=request, slot=slot, reuse=Reuse(), layout=Layout(TEXT))
    job.tokens = np.zeros(500, np.int32)
    job.tokens[: len(tokens)] = tokens
    job.num_tokens = len(tokens)
    if cached:
        job.reuse.spans.append(ReusedSpan(0, cached, "own", 0.0))
    return cast(Job, job)


def grow(job, *tokens):
    job.tokens[job.num_tokens : job.num_tokens + len(tokens)] = tokens
    job.num_tokens += len(tokens)


def drafts(drafter, *jobs, most=5):
    for job in jobs:
        while drafter.lacking(job) > 10 and drafter.read(job, 64):
            pass
    return drafter.draft(jobs, [most] * len(jobs), lambda place, confidences: True)


def ask(drafter, *jobs, most=5):
    return [draft.tokens.tolist() for draft in drafts(drafter, *jobs, most=most)]


def afresh(served, path, tokens, most=5):
    with closing(drafter_of(served, path)) as other:
        return ask(other, running(9, 0, tokens), most=most)[0]


def same_drafts(one, other):
    """Whether the tokens are the same; on a GPU up to the first two of which either is as probable as the other one."""
    rows = zip(one.tokens, other.tokens, one.confidences, other.confidences, strict=True)
    for token, other_token, confidence, other_confidence in rows:
        if token != other_token:
            return HAS_OWN_KERNELS and abs(confidence - other_confidence) <= NEAR
    return True


def test_what_it_drafts_is_what_it_would_say_afresh(served, tiny, drafter):
    job = running(1, 0, TEXT[:20])
    (first,) = ask(drafter, job)
    assert len(first) == 5 and first == afresh(served, tiny, TEXT[:20])
    grow(job, *first[:2], 77)  # two were right
    assert drafter.lacking(job) == 0
    assert ask(drafter, job)[0] == afresh(served, tiny, [*TEXT[:20], *first[:2], 77])
    grow(job, 78)  # none was
    assert ask(drafter, job)[0] == afresh(served, tiny, job.tokens[: job.num_tokens])
    (last,) = ask(drafter, job)
    grow(job, *last, 5)  # all were: the last one has no KV yet
    assert drafter.lacking(job) == 1
    assert ask(drafter, job)[0] == afresh(served, tiny, job.tokens[: job.num_tokens])


def test_streams_do_not_mix(served, tiny, drafter):
    jobs = [running(number, number, TEXT[number : 20 + 3 * number]) for number in range(3)]
    alone = [afresh(served, tiny, job.tokens[: job.num_tokens]) for job in jobs]
    assert ask(drafter, *jobs) == alone
    for job, draft in zip(jobs, alone, strict=True):
        grow(job, *draft[:1], 60)
    drafts = drafter.draft(jobs, [4, 1, 3], lambda place, confidences: len(confidences) < 2)
    assert [len(draft.tokens) for draft in drafts] == [2, 1, 2]
    for job, draft in zip(jobs, drafts, strict=True):
        reported = afresh(served, tiny, job.tokens[: job.num_tokens])
        assert draft.tokens.tolist() == reported[: len(draft.tokens)]
        assert all(0 < one <= 1 for one in draft.confidences) and len(draft.confidences) == len(draft.tokens)


def test_a_prompt_is_read_in_pieces(served, tiny, drafter):
    job = running(1, 0, TEXT)
    assert drafter.lacking(job) == 59
    assert drafter.read(job, 32) and drafter.lacking(job) == 27
    assert drafter.read(job, 64) and drafter.lacking(job) == 0
    before = drafter.num_tokens
    assert ask(drafter, job)[0] == afresh(served, tiny, TEXT) and drafter.num_tokens - before == 5


def test_a_new_request_ends_a_piece(served, drafter):
    job = running(1, 0, TEXT)
    drafter._runner.interrupt.set()
    assert not drafter.read(job, 32) and drafter.lacking(job) == 59 and not drafter.num_failures
    drafter._runner.interrupt.clear()
    assert drafter.read(job, 32)


def test_a_prefix_is_shared_within_its_scope_as_far_as_the_cache_had_it(served, tiny, drafter):
    ask(drafter, running(1, 0, TEXT[:40]))
    beside = running(2, 1, TEXT[:50], cached=30)
    assert drafter.lacking(beside) == 49 - 30
    assert ask(drafter, beside)[0] == afresh(served, tiny, TEXT[:50])
    assert drafter.lacking(running(3, 2, TEXT[:50], cached=30, scope=Scope.shared("b"))) == 49
    assert drafter.lacking(running(4, 2, TEXT[:50])) == 49, "what the cache no longer has"
    own = running(5, 0, TEXT[:50], cached=45)
    assert drafter.lacking(own) < 49 - 39
    drafter.forget(SCOPE)
    assert drafter.lacking(running(6, 0, TEXT[:50], cached=45)) == 49
    assert ask(drafter, own)[0] == afresh(served, tiny, TEXT[:50]), "it reads again what was forgotten"


def test_the_history_of_an_idle_slot_is_read_ahead(served, tiny, drafter):
    ask(drafter, running(1, 0, TEXT[:20]))
    slot = SimpleNamespace(id=0, last=1, scope=SCOPE, history=TEXT[:40])
    assert drafter.read_ahead(slot, 36, 10) and drafter.read_ahead(slot, 36, 10)
    assert not drafter.read_ahead(slot, 36, 10)
    job = running(2, 0, TEXT, cached=36)
    assert drafter.lacking(job) == 59 - 36
    assert ask(drafter, job)[0] == afresh(served, tiny, TEXT)
    slot.scope = None
    assert not drafter.read_ahead(slot, 0, 10)


def test_idle_slots_give_way_and_a_request_without_room_goes_without(served, tiny):
    with closing(drafter_of(served, tiny, cells=64)) as drafter:
        cells = drafter.context.num_cells
        long = np.resize(TEXT, cells - 20)
        first, second = running(1, 0, long), running(2, 1, TEXT[:50])
        while drafter.lacking(first) > 10:
            assert drafter.read(first, 64)
        assert len(ask(drafter, first)[0]) == 5
        assert ask(drafter, second)[0] == afresh(served, tiny, TEXT[:50])
        assert drafter.lacking(first) == len(long) - 1, "its cells went to the other one"
        endless = running(3, 2, np.resize(TEXT, cells + 30))
        while drafter.lacking(endless) > 0 and drafter.read(endless, 64):
            pass
        assert drafter.lacking(endless) == -1 and not drafter.num_failures and not drafter.is_off
        assert ask(drafter, second)[0] == afresh(served, tiny, TEXT[:50])


@pytest.mark.parametrize("is_windowed", [False, True])
def test_a_device_is_timed_with_a_draft_model_of_one_slot(served, tiny, tmp_path, is_windowed):
    path = windowed(tmp_path / "windowed.gguf") if is_windowed else tiny
    with (
        closing(Model(path)) as model,
        closing(Context(model, SETTINGS)) as own,
        closing(drafter_of(own, path, slots=1)) as drafter,
    ):
        assert DeviceTiming(drafter.context).run().idle > 0


def test_a_restored_history_is_forgotten_with_its_own_scope(drafter):
    """No request has left it, and none the one before it: only their scopes tell them apart."""
    slot, other = Slot(0, scope=SCOPE, history=TEXT), Scope.shared("b")
    assert drafter.read_ahead(slot, 40, 64)
    slot.scope = other
    assert drafter.read_ahead(slot, 40, 64), "what another scope has is read again"
    drafter.forget(SCOPE)
    assert drafter._kept[0].length == 40
    drafter.forget(other)
    assert drafter._kept[0].length == 0


def test_a_windowed_draft_model_drafts_as_afresh(served, tmp_path):
    path = windowed(tmp_path / "windowed.gguf")
    with (
        closing(Model(path)) as model,
        closing(Context(model, SETTINGS)) as own,
        closing(drafter_of(own, path)) as drafter,
    ):
        job = running(1, 0, np.resize(TEXT, 200))
        while drafter.lacking(job) > 0:
            assert drafter.read(job, 64)
        for _ in range(6):
            (draft,) = drafts(drafter, job)
            with closing(drafter_of(own, path)) as other:
                assert same_drafts(draft, *drafts(other, running(9, 0, job.tokens[: job.num_tokens])))
            grow(job, *draft.tokens[:2], 50)


def test_a_draft_model_that_fails_is_off_in_the_end(drafter, monkeypatch):
    def fails(*_, **__):
        raise RunnerError("as if the device had gone")

    job = running(1, 0, TEXT[:9])
    assert len(ask(drafter, job)[0]) == 5
    with monkeypatch.context() as broken:
        broken.setattr(Runner, "run", fails)
        for _ in range(TRIES - 1):
            assert ask(drafter, job) == [[]]
    assert not drafter.is_off and drafter.lacking(job) == 8
    assert len(ask(drafter, job)[0]) == 5
    monkeypatch.setattr(Runner, "run", fails)
    assert not drafter.read(running(2, 1, TEXT), 8) and drafter.is_off


def refusal(served, path):
    with pytest.raises(ModelError) as error:
        drafter_of(served, path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_draft_model_that_does_not_fit_is_refused_with_what_differs(served, tmp_path):
    shape = SHAPES["tiny"]
    larger = generate(tmp_path / "larger.gguf", replace(shape, vocabulary=2048))
    assert "2,048 tokens instead of 1,024" in refusal(served, larger)
    other = generate(tmp_path / "other.gguf", replace(shape, merges=600))
    assert "token " in refusal(served, other) and "instead of" in refusal(served, other)
    assert "cannot be cut" in refusal(served, hybrid(tmp_path / "hybrid.gguf"))


def test_a_token_that_only_the_served_model_has_ends_drafting_for_its_request(served, tmp_path):
    smaller = generate(tmp_path / "smaller.gguf", replace(SHAPES["tiny"], vocabulary=1000))
    with closing(drafter_of(served, smaller)) as drafter:
        job = running(1, 0, [*TEXT, 1010, 5])
        assert not drafter.read(job, 64) and drafter.lacking(job) == -1 and not drafter.num_failures
        assert len(ask(drafter, running(2, 0, TEXT))[0]) == 5


def test_histories_that_do_not_fit_together_are_read_ahead_once(served, tiny):
    """Else idle slots would free each other's cells in turn, and the server would neither rest nor fall asleep."""
    with closing(drafter_of(served, tiny, cells=64)) as drafter:
        size, pieces = drafter.context.num_cells - 20, 0
        histories = [np.resize(TEXT, size) + number for number in range(3)]
        slots = [Slot(number, last=number, scope=SCOPE, history=history) for number, history in enumerate(histories)]
        for slot in slots:
            ask(drafter, running(slot.last, slot.id, slot.history[:20]))
        while any(drafter.read_ahead(slot, size, 16) for slot in slots):
            pieces += 1
            assert pieces < 5 * size // 16, "it reads for ever"
        assert drafter._kept[2].length == size, "that of the last one used stays"
