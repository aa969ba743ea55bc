"""Reuse never changes a result.

On the CPU without flash attention, logits after reuse equal those of a fresh prefill bit for bit, as long as each token's
KV stands at a cell congruent to its position modulo 32: llama.cpp's kernels sum over cells in vectors of that width, so
any other place rounds differently (see docs/exactness.md). `same_answers` is for such places; where several streams share
the pool, `close` compares every token with a fresh prefill of all that came before it. The model's weights are in Q8_0, so
small that one token alone is rounded like many; `test_exactness_weights` has weights where it is not.
"""

import numpy as np
import pytest
from slotcache.models.model import Model
from slotcache.slots.scope import Scope
from support.architectures import windowed
from support.lab import Lab
from support.on_device import ON_DEVICE, same_answers

TEXT = (
    "The river rises in the hills above the town and runs for nine miles before it meets the sea. "
    "In spring the ferry crosses every hour, and in winter only when the wind allows. "
)


@pytest.fixture(scope="module", params=["dense", "windowed"])
def model(request, tiny, tmp_path_factory):
    """Return a model: with the window nearly every token of these prompts is behind it."""
    is_dense = request.param == "dense"
    model = Model(tiny if is_dense else windowed(tmp_path_factory.mktemp("models") / "windowed.gguf"))
    yield model
    model.close()


@pytest.fixture
def lab(model):
    lab = Lab(model)
    yield lab
    lab.close()


@pytest.fixture
def words(model):
    """Several hundred tokens of text, the same each time."""
    return model.tokenize(TEXT * 8)


def fresh(model, tokens, limit):
    """The same request on an empty cache, its prompt computed in one go where it fits one batch."""
    lab = Lab(model, batch=512, budget=512)
    answer = lab.run(tokens, limit=limit)
    lab.close()
    assert answer.job.reuse.cached == 0
    return answer


def close(model, answer, samples=4):
    """Every sampled row is within rounding of a fresh prefill of the same tokens; a foreign cell would be far off."""
    job = answer.job
    for at in np.linspace(0, len(answer.tokens) - 1, min(samples, len(answer.tokens))).astype(int):
        expected = fresh(model, job.tokens[: job.num_prompt + at], 1).logits[0]
        assert np.abs(answer.logits[at] - expected).max() < 0.1 * np.abs(expected).max()


def aligned(lab, near):
    """The largest length up to `near` where a fork's own tokens start at a cell congruent to their position."""
    return near - (near - lab.scheduler.cells.num_used) % 32


def test_a_fork_is_exact_and_leaves_its_donor_exact(model, lab, words):
    first = lab.run(words[:300], limit=4)
    cut = aligned(lab, 250)
    other = np.concatenate([words[:cut], words[50:120]])
    forked = lab.run(other, limit=4)
    assert forked.job.reuse.source == "fork" and forked.job.reuse.cached == cut
    assert same_answers(forked, fresh(model, other, 4))
    whole = np.concatenate([words[:300], first.tokens, words[:40]])
    continued = lab.run(whole, limit=4)
    assert continued.job.reuse.source == "own" and continued.job.reuse.cached == 303
    close(model, continued)


def test_continuing_in_place_is_exact(model, lab, words):
    first = lab.run(words[:300], limit=4)
    whole = np.concatenate([words[:300], first.tokens, words[:40]])
    second = lab.run(whole, limit=6)
    assert second.job.reuse.source == "own" and second.job.reuse.cached == 303
    assert same_answers(second, fresh(model, whole, 6))


def test_a_fork_inside_a_run_is_exact(model, lab, words):
    lab.run(words[:300], limit=2)
    for near in (40, 100, 157, 299):
        cut = aligned(lab, near)
        other = np.concatenate([words[:cut], words[cut + 3 : cut + 90]])
        forked = lab.run(other, limit=3)
        assert forked.job.reuse.cached == cut
        assert same_answers(forked, fresh(model, other, 3))


def test_a_fork_anywhere_is_within_rounding(model, lab, words):
    lab.run(words[:300], limit=2)
    for cut in (1, 33, 158, 299):
        other = np.concatenate([words[:cut], words[cut + 3 : cut + 90]])
        forked = lab.run(other, limit=3)
        assert forked.job.reuse.cached >= cut
        close(model, forked)


@pytest.mark.parametrize("flash, recompute_last", [("on", 1), ("off", 9 if ON_DEVICE else 8)])
def test_a_prompt_that_is_fully_cached_computes_its_rest(model, words, flash, recompute_last):
    """One token for its logits; without flash attention as many as round like a whole prompt."""
    lab = Lab(model, flash=flash)
    cold = lab.run(words[:200], limit=3)
    prefilled = lab.scheduler.counters.prefilled_tokens
    warm = lab.run(words[:200], limit=3)
    assert warm.job.reuse.cached == 200 - recompute_last
    assert lab.scheduler.counters.prefilled_tokens == prefilled + recompute_last
    if flash == "off":
        close(model, warm)
        close(model, cold)
    lab.close()


def test_a_fork_from_a_busy_request_is_exact(model, lab, words):
    busy = lab.submit(words[:260], limit=30)
    while len(busy.tokens) < 5:
        lab.step()
    other = np.concatenate([words[:180], words[:60]])
    forked = lab.submit(other, limit=3)
    lab.finish()
    assert forked.job.reuse.source == "fork" and forked.job.reuse.cached >= 180
    close(model, forked)
    close(model, busy, samples=8)


def test_a_donor_in_the_middle_of_its_prefill_gives_what_it_has(model, words):
    lab = Lab(model, batch=64)
    donor = lab.submit(words[:300], limit=2)
    lab.step()
    lab.step()
    assert donor.job.computed == 128
    other = np.concatenate([words[:120], words[200:260]])
    early = lab.submit(other, limit=2)
    lab.finish()
    assert early.job.reuse.cached == 120
    close(model, early)
    close(model, donor)
    lab.close()


def test_identical_prompts_that_arrive_together_are_computed_once(model, lab, words):
    answers = [lab.submit(words[:300], limit=3) for _ in range(4)]
    lab.finish()
    assert (
        lab.scheduler.counters.prefilled_tokens == 300 + 3 * lab.context.costs.recompute_last
    )  # the end of each that waited
    for answer in answers:
        close(model, answer)


def test_eviction_and_reuse_of_what_is_left_is_exact(model, words):
    lab = Lab(model, num_cells=512)
    lab.run(words[:300], limit=2, stops=[100, 200])
    lab.run(words[20:330], limit=2)  # does not fit beside the first: its last runs leave
    assert lab.scheduler.tree.num_evicted > 0
    again = lab.run(words[:300], limit=2, stops=[100, 200])
    assert 0 < again.job.reuse.cached < 299
    close(model, again)
    lab.close()


def test_with_a_host_tier_one_request_at_a_time_is_exact_wherever_it_forks(model, words):
    """Idle KV leaves the device before a request starts, so every token stands where a fresh prefill would put it."""
    lab = Lab(model, host=100_000)
    lab.run(words[:300], limit=9)
    rng = np.random.default_rng(3)
    for _ in range(12):
        cut = int(rng.integers(1, 300))
        other = np.concatenate([words[:cut], words[rng.integers(0, 300) :][:90]])
        forked = lab.run(other, limit=5)
        assert forked.job.reuse.cached >= cut
        assert same_answers(forked, fresh(model, other, 5))
    assert lab.scheduler.tree.copies.num_restored > 500
    lab.close()


def test_every_node_survives_host_memory(model, words):
    lab = Lab(model, host=100_000)
    first = lab.run(words[:300], limit=3, stops=[40, 100, 101, 250])
    lab.run(words[7:60], limit=2)  # sends everything else to host memory
    assert lab.scheduler.tree.device.num_ready == 54
    for cut in (30, 40, 70, 100, 101, 200, 250, 299):
        other = np.concatenate([words[:cut], words[310:340]])
        restored = lab.run(other, limit=2)
        assert restored.job.reuse.cached >= cut
        assert same_answers(restored, fresh(model, other, 2))
        lab.run(words[7:60], limit=2)
    again = lab.run(words[:300], limit=3)
    assert again.job.reuse.cached == 300 - lab.context.costs.recompute_last and again.job.reuse.source == "host"
    assert same_answers(again, first)
    lab.close()


def test_a_preempted_request_resumes_exactly(model, words):
    lab = Lab(model, num_cells=512, slots=2)
    answers = [lab.submit(words[start : start + 200], limit=120) for start in (0, 7)]
    lab.finish()
    assert lab.scheduler.counters.preemptions > 0
    assert [len(answer.tokens) for answer in answers] == [120, 120]
    for answer in answers:
        close(model, answer, samples=20)
    lab.close()


def test_requests_that_join_and_leave_do_not_disturb_each_other(model, lab, words):
    rng = np.random.default_rng(0)
    answers = []
    for _ in range(24):
        start, cut = int(rng.integers(0, 40)) // 20 * 20, int(rng.integers(20, 240))
        answers.append(lab.submit(words[start : start + cut], limit=int(rng.integers(1, 12))))
        for _ in range(int(rng.integers(0, 6))):
            lab.step()
    lab.finish()
    for answer in answers[::3]:
        close(model, answer)


def test_without_cache_prompt_nothing_is_read_and_nothing_left(model, lab, words):
    cached = lab.run(words[:200], limit=3)
    private = lab.run(words[:200], limit=3, cache=False)
    assert private.job.reuse.cached == 0 and private.job.reuse.source == "none"
    close(model, private)
    close(model, cached)
    used = lab.scheduler.cells.num_used
    lab.run(words[5:150], limit=3, cache=False)
    assert lab.scheduler.cells.num_used == used


def test_scopes_share_nothing(model, lab, words):
    first = lab.run(words[:200], limit=3, scope=Scope.shared("x"))
    second = lab.run(words[:200], limit=3, scope=Scope.shared("y"))
    assert second.job.reuse.cached == 0 and first.job.reuse.cached == 0
    close(model, second)


def test_with_flash_attention_reuse_is_close(model, words):
    lab = Lab(model, flash="on")
    lab.run(words[:300], limit=1)
    other = np.concatenate([words[:200], words[50:120]])
    forked = lab.run(other, limit=1)
    plain = Lab(model, flash="on", batch=512)
    expected = plain.run(other, limit=1).logits[0]
    assert forked.job.reuse.cached >= 200
    assert np.abs(forked.logits[0] - expected).max() < 0.2 * np.abs(expected).max()
    lab.close()
    plain.close()


def test_setting_others_aside_changes_nothing(model, words):
    lab = Lab(model, host=5000, apart=0, aside=20)
    prompts = [np.concatenate([words[:90], words[start : start + 120]]) for start in range(100, 340, 30)]
    answers = [lab.submit(prompt, limit=12 + 5 * number, stops=[90]) for number, prompt in enumerate(prompts)]
    lab.finish()
    assert lab.scheduler.cells.swap.num_swapped > 1000
    for answer in answers:
        close(model, answer)
    again = lab.run(prompts[0], limit=3)
    assert again.job.reuse.cached == len(prompts[0]) - lab.context.costs.recompute_last
    close(model, again)
    lab.close()


def test_a_prompt_beside_others_that_are_set_aside_is_computed_bit_for_bit_as_alone(model, words):
    lab = Lab(model, host=5000, apart=0, aside=0, budget=256)
    others = [lab.submit(words[start : start + 150], limit=40) for start in (10, 30, 50)]
    for _ in range(8):
        lab.step()
    answer = lab.submit(words[200:400], limit=1)
    lab.finish()
    assert all(len(other.tokens) == 40 for other in others) and lab.scheduler.cells.swap.num_swapped > 0
    plain = Lab(model, host=5000, apart=0, budget=256)
    expected = plain.run(words[200:400], limit=1)
    assert (answer.logits[0] == expected.logits[0]).all()
    lab.close()
    plain.close()
