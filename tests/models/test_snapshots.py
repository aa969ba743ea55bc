"""Models whose memory cannot be cut: going on from a snapshot gives the bits of a full prefill."""

import numpy as np
import pytest
from slotcache.models.context import Context, ContextSettings
from slotcache.models.model import Model
from slotcache.models.runner import RECURRENT, Runner
from slotcache.slots.plan import Drop, Span, Trim
from slotcache.slots.radix import path
from slotcache.slots.scope import Scope
from support import architectures
from support.lab import Lab
from support.on_device import NEAR, same, same_answers

BUDGET = 64 << 20
S = Scope.shared("s")


@pytest.fixture(scope="module", params=["recurrent", "hybrid", "delta", "mamba2"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / f"{request.param}.gguf"
    model = Model(getattr(architectures, request.param)(path))
    yield model
    model.close()


def lab_of(model, budget=BUDGET, num_cells=1024, spacing=50):
    return Lab(model, num_cells=num_cells, batch=128, budget=64, sequences=16, states=budget, spacing=spacing)


def fresh(model, tokens, limit):
    lab = lab_of(model, budget=0)
    answer = lab.run(tokens, limit=limit, cache=False)
    lab.close()
    assert answer.job.reuse.cached == 0
    return answer


def equal(answer, reference, near=0.0):
    assert same_answers(answer, reference, near)


def rounding(model):
    """Return how far logits may differ beside other requests: without any snapshot, llama.cpp's Mamba 2 differs by 0.15."""
    return NEAR if model.metadata("general.architecture") == "granitehybrid" else 0.0


@pytest.fixture
def prompt():
    return np.random.default_rng(1).integers(300, 900, 400).astype(np.int32)


def kept(lab, scope=S):
    return sorted(node.end for node in lab.snapshots.of(scope))


def deepest(lab, tokens):
    """Return the node with the deepest state that tokens begin with."""
    node = lab.snapshots.longest(S, tokens)
    assert node is not None
    return node


def copies(node):
    """Return a run, and the state at its end."""
    assert node.copy is not None and node.copy.data is not None
    assert node.state is not None and node.state.data is not None
    return node.copy.data, node.state.data


def copy(lab):
    """Copy the states that are still to be copied to host memory."""
    plan = lab.scheduler.plan_idle_work()
    assert plan is not None
    lab.runner.run(plan)


def test_the_state_cannot_be_cut_and_its_size_is_known(model, prompt):
    assert not model.can_trim
    lab = lab_of(model)
    lab.run(prompt, limit=5, stops=(100, 300), cache=False, snapshots=S)
    snapshots = lab.snapshots
    assert kept(lab) == [100, 300, 404]
    copy(lab)
    found = [copies(node) for node in path(deepest(lab, lab.answers[1].job.tokens[:404]))]
    copied = sum(len(run) + len(state) for run, state in found)
    assert snapshots.host.num_bytes <= copied < 1.1 * snapshots.host.num_bytes + 4096, "runs have a frame, too"
    lab.close()


def test_a_next_turn_and_a_branch_take_up_the_nearest_snapshot(model, prompt):
    lab = lab_of(model)
    first = lab.run(prompt, limit=5, stops=(100, 300), cache=False, snapshots=S)
    equal(first, fresh(model, prompt, 5))
    turn = np.concatenate([prompt, first.tokens[:-1], prompt[:30]]).astype(np.int32)
    second = lab.run(turn, limit=3, cache=False, snapshots=S)
    assert second.job.reuse.cached == 404 and second.job.reuse.source == "snapshot"
    equal(second, fresh(model, turn, 3))
    branch = np.concatenate([prompt[:350], prompt[:30]]).astype(np.int32)
    third = lab.run(branch, limit=3, cache=False, snapshots=S)
    assert third.job.reuse.cached == 300
    equal(third, fresh(model, branch, 3))
    other = lab.run(prompt, limit=1, cache=False, snapshots=Scope.shared("another"))
    assert other.job.reuse.cached == 0
    lab.close()


def test_the_last_token_is_computed_again(model, prompt):
    lab = lab_of(model)
    lab.run(prompt, limit=1, stops=(100,), cache=False, snapshots=S)
    assert kept(lab) == [100, 400]
    again = lab.run(prompt, limit=2, cache=False, snapshots=S)
    assert again.job.reuse.cached == 100
    equal(again, fresh(model, prompt, 2))
    lab.close()


def test_a_prompt_that_comes_again_continues_a_few_tokens_in_front_of_its_end(model, prompt):
    lab, expected = lab_of(model), fresh(model, prompt, 4)
    answers = [lab.run(prompt, limit=4, cache=False, snapshots=S) for _ in range(4)]
    near = len(prompt) - lab.scheduler.tree.recompute_last
    assert [one.job.reuse.cached for one in answers] == [0, 0, near, near] and near < len(prompt) - 1
    for answer in answers:
        equal(answer, expected)
    other = np.concatenate([prompt[:250], prompt[:70]]).astype(np.int32)
    assert lab.run(other, limit=1, cache=False, snapshots=S).job.reuse.cached == 0
    parted = lab.run(other, limit=4, cache=False, snapshots=S)
    equal(parted, fresh(model, other, 4))
    branch = np.concatenate([prompt[:250], prompt[70:140]]).astype(np.int32)
    third = lab.run(branch, limit=4, cache=False, snapshots=S)
    assert third.job.reuse.cached == 250, "where the two before it part"
    equal(third, fresh(model, branch, 4))
    lab.close()


def test_another_last_question_of_a_chat_of_short_turns(model, prompt):
    lab = lab_of(model)
    before = chat = prompt[:30]
    for turn in range(8):
        asked = lab.run(chat, limit=9, stops=(len(chat) - 10,), cache=False, snapshots=S)
        before, chat = chat, np.concatenate([chat, asked.tokens, prompt[30 + 20 * turn :][:20]]).astype(np.int32)
    again = lab.run(before, limit=4, cache=False, snapshots=S)
    edited = np.concatenate([before[:-20], prompt[-20:]]).astype(np.int32)
    other = lab.run(edited, limit=4, cache=False, snapshots=S)
    assert again.job.reuse.cached == other.job.reuse.cached == len(before) - 21, "the last token of an answer has no KV"
    equal(again, fresh(model, before, 4))
    equal(other, fresh(model, edited, 4))
    lab.close()


def test_stops_are_well_apart_and_not_many(model, prompt):
    lab = lab_of(model, spacing=60)
    lab.run(prompt, limit=1, stops=(20, 100, 130, 300, 380, 390), cache=False, snapshots=S)
    assert kept(lab) == [130, 300, 380, 400]
    lab.close()


def test_requests_beside_each_other(model, prompt):
    lab = lab_of(model)
    prompts = [np.roll(prompt, -number)[: 150 + number] for number in range(5)]
    answers = []
    for _ in range(2):
        answers = [lab.submit(one, limit=4, stops=(90,), cache=False, snapshots=S) for one in prompts]
        lab.finish()
    for answer, one in zip(answers, prompts, strict=True):
        assert answer.job.reuse.cached == 90
        equal(answer, fresh(model, one, 4), rounding(model))
    lab.close()


def test_a_request_waits_for_the_snapshots_that_another_one_takes(model, prompt):
    lab = lab_of(model)
    prompts = [np.concatenate([prompt[:300], prompt[at : at + 50]]) for at in (0, 100)]
    first, second = [lab.submit(one, limit=4, stops=(100, 220), cache=False, snapshots=S) for one in prompts]
    lab.finish()
    assert first.job.reuse.cached == 0 and second.job.reuse.sources == {"snapshot": 220}
    for answer, one in zip((first, second), prompts, strict=True):
        equal(answer, fresh(model, one, 4), rounding(model))
    lab.close()


def test_preempted_and_resumed_from_a_snapshot(model, prompt):
    lab = lab_of(model, num_cells=512)
    prompts = [np.roll(prompt, -number)[:200] for number in range(3)]
    answers = [lab.submit(one, limit=60, stops=(150,), cache=False, snapshots=S) for one in prompts]
    lab.finish()
    assert lab.scheduler.counters.preemptions and lab.snapshots.num_loaded
    for answer, one in zip(answers, prompts, strict=True):  # in other cells than alone, which rounds a row differently
        equal(answer, fresh(model, one, 60), NEAR)
    lab.close()


def test_the_budget_holds_and_the_oldest_are_evicted(model, prompt):
    lab = lab_of(model)
    size = lab.snapshots.host.size_of(98) + 98 * lab.snapshots.host.sizes.run_token
    lab.snapshots.host.max_bytes = int(2.5 * size)
    scopes = [Scope.shared(str(number)) for number in range(4)]
    for number, scope in enumerate(scopes):
        lab.run(np.roll(prompt, -number)[:98], limit=1, cache=False, snapshots=scope)
        assert lab.snapshots.host.num_bytes <= lab.snapshots.host.max_bytes
    assert [len(kept(lab, scope)) for scope in scopes] == [0, 0, 1, 1]
    assert lab.snapshots.drop(scopes[3]) == 98 and not kept(lab, scopes[3])
    assert set(lab.snapshots.roots) == {scopes[2]}
    lab.close()


def test_snapshots_that_were_never_made_are_forgotten(model, prompt):
    lab = lab_of(model)
    answer = lab.submit(prompt, limit=4, stops=(100,), cache=False, snapshots=S)
    while answer.job.computed < 100:
        lab.step()
    lab.scheduler.recover()
    lab.scheduler.finish(answer.job)
    assert not lab.snapshots.of(S) and not lab.snapshots.host.num_bytes
    lab.runner.clear()
    equal(lab.run(prompt, limit=4, cache=False, snapshots=S), fresh(model, prompt, 4))
    lab.close()


def forgeries(data, positions):
    """Return copies with trailing bytes, without the last byte, and with another number where the frame has one."""
    words = data[: len(data) // 4 * 4].view(np.uint32)
    counts = (architectures.LAYERS, *positions)
    frame = [0, *(at for number in counts for at in np.flatnonzero(words == number)[:1])]
    for at in frame:
        forged = data.copy()
        forged[4 * at] ^= 64
        yield forged
    yield from (data[:-1], np.append(data, data[:1]), data[:0])


def test_a_forged_run_or_state_is_not_accepted(model, prompt):
    lab = lab_of(model)
    states = lab.runner.states
    lab.run(prompt, limit=1, stops=(100,), cache=False, snapshots=S)
    copy(lab)
    *_, node = path(deepest(lab, prompt))
    (run, state), length = copies(node), node.end
    assert states.accepts(run, 0, length) and states.accepts_recurrent(state, length)
    assert not states.accepts(run, 0, length - 1) or not lab.snapshots.host.sizes.run_token
    assert not states.accepts_recurrent(state, length - 1) and not states.accepts_recurrent(run, length)
    assert not any(states.accepts(forged, 0, length) for forged in forgeries(run, ()))
    assert not any(states.accepts_recurrent(forged, length) for forged in forgeries(state, (length - 1,)))
    lab.close()


def test_states_that_come_back_as_they_were_saved_are_relied_on(model):
    lab = lab_of(model)
    assert lab.runner.measure_states() is not None
    lab.close()


def without_numbers(data):
    """A state whose numbers are gone: zeros in the last two thirds."""
    forged = data.copy()
    forged[len(data) // 3 :] = 0
    return forged


@pytest.mark.parametrize("fault", ["saved in part", "loaded into nothing", "loaded for all"])
def test_states_that_do_not_come_back_are_found_out_at_the_start(model, monkeypatch, fault):
    """As if llama.cpp saved less than the state, did not load it, or changed another sequence with it."""
    lab = lab_of(model)
    states = lab.runner.states
    copy, put = states._copy, states._set

    def is_state(sequence, flags):
        return sequence != lab.context.scratch and (flags == RECURRENT or not states._has_runs)

    def saved(sequence, flags):
        data = copy(sequence, flags)
        return without_numbers(data) if is_state(sequence, flags) else data

    def loaded(data, sequence, flags):
        if fault == "loaded for all" and is_state(sequence, flags):
            put(data, 0, flags)
        if fault != "loaded into nothing" or not is_state(sequence, flags):
            put(data, sequence, flags)

    if fault == "saved in part":
        monkeypatch.setattr(states, "_copy", saved)
    monkeypatch.setattr(states, "_set", loaded)
    assert lab.runner.measure_states() is None
    lab.close()


# ---- States that go back behind wrong drafts. ---------------------------------------------------------------------------


def with_rollback(model, kernel=128):
    settings = ContextSettings(
        num_cells=256, batch=kernel, micro_batch=kernel, flash_attention="off", threads=1, num_sequences=8, rollback=4
    )
    return Context(model, settings)


@pytest.mark.parametrize("kernel", [1, 3, 5, 6])
def test_a_state_goes_back_over_less_than_a_kernel_computes(model, kernel):
    """llama.cpp ends the process where a kernel computes no more than that."""
    context = with_rollback(model, kernel)
    runner = Runner(context)
    runner.compute_zeros(0, 4)
    if context.rollback:
        runner.apply(Trim(0, 4 - int(min(context.rollback, 3)), 4))
    context.close()
    assert context.rollback in (0, max(min(4, kernel - 2), 0))


@pytest.mark.parametrize("rows", [(5, 5, 5), (3, 3, 3)])
def test_states_go_back_beside_those_that_move(model, rows):
    """Rows of one kernel: the second and the third sequence move to stand behind the first one."""
    prompts = np.random.default_rng(2).integers(300, 900, (4, 30)).astype(np.int32)

    def logits(others):
        context = with_rollback(model)
        if not context.rollback:
            context.close()
            pytest.skip("this model's states do not go back")
        runner = Runner(context)

        def compute(start, sequences, sizes):
            parts = [(one, prompts[one, start : start + size]) for one, size in zip(sequences, sizes, strict=True)]
            runner._try(*(Span(0, one, start, tokens, logits=True) for one, tokens in parts))

        for sequence in (0, 1):
            compute(0, [sequence], [20])
        if others:
            runner.apply(Drop(0))
            for sequence in (2, 3):  # in front of it, and behind it
                compute(0, [sequence], [20])
        compute(20, [1, 2, 3], rows) if others else compute(20, [1], rows[:1])
        runner.apply(Trim(1, 22, 20 + rows[0]))
        compute(22, [1], [1])
        found = runner.logits(1)[0].copy()
        context.close()
        return found

    assert same(logits(others=True), logits(others=False))
