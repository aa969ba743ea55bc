"""Snapshots of whole states within a budget, without a model."""

import numpy as np
import pytest
from slotcache.slots import radix
from slotcache.slots.check import check
from slotcache.slots.costs import Costs
from slotcache.slots.eviction import EvictionPolicy
from slotcache.slots.host import HostMemory, Nothing
from slotcache.slots.plan import Clear
from slotcache.slots.prefix_tree import PrefixTree
from slotcache.slots.radix import CopySizes
from slotcache.slots.record import Record
from slotcache.slots.request import Kind, Request
from slotcache.slots.scheduler import Scheduler
from slotcache.slots.scope import Scope
from slotcache.slots.snapshots import Snapshots, state_of
from support.fixed_prompt import Fixed
from support.memory import Memory, cut, next_token
from support.reuse import reuse_with

S = Scope.shared("s")
SIZES = CopySizes(run_token=1, state=5)


class Server:
    """A hybrid model, with `budget` bytes for one byte a token and five a state."""

    def __init__(self, budget, cells=100, spacing=2, unused=2, **costs):
        self.memory = Memory(cells, can_cut=False)
        tree = PrefixTree(cells, 8, costs=Costs(**costs))
        self.pieces = []  # the tokens of each span, in order
        self.snapshots = Snapshots(tree, HostMemory(budget, sizes=SIZES, cut=cut), spacing=spacing, unused=unused)
        self.scheduler = Scheduler(tree, num_slots=2, **reuse_with(self.snapshots))

    def ask(self, tokens, stops=(), forced=(), limit=1, breakpoints=(), session=""):
        """Return how much of a prompt a snapshot spared. stops: ends of segments before its own end. forced: tokens that
        follow the first one of the answer, which has one more behind them.
        """
        prompt = Fixed(tokens, [*stops, len(tokens)], breakpoints=breakpoints)
        limit = len(forced) + 2 if forced else limit
        private = Scope.private(len(tokens))
        request = Request(len(tokens), prompt, limit, private, cache=False, snapshot_scope=S, session=session)
        job = self.scheduler.submit(request)
        while job.num_tokens < job.num_prompt + limit:
            plan = self.scheduler.plan()
            self.pieces += [len(span.tokens) for span in plan.spans]
            for asked, _ in self.scheduler.commit(plan, self.memory.run(plan)):
                for token in forced if asked.num_tokens == asked.num_prompt + 1 else ():
                    asked.force(token)
            check(self.scheduler)
        self.scheduler.finish(job)
        self.memory.run(self.scheduler.plan())
        check(self.scheduler)
        return job.reuse.cached

    def answer_together(self, *prompts, limit, marks=((), ())):
        """Return the turns of prompts whose answers are computed beside each other. marks: breakpoints of each."""
        asked = {"cache": False, "snapshot_scope": S}
        fixed = [
            Fixed(tokens, [*stops, len(tokens)], breakpoints=[(stop, 0.0) for stop in stops])
            for tokens, stops in zip(prompts, marks, strict=True)
        ]
        jobs = [
            self.scheduler.submit(Request(at, prompt, limit, Scope.private(at), **asked)) for at, prompt in enumerate(fixed)
        ]
        while not self.scheduler.idle:
            plan = self.scheduler.plan()
            self.pieces += [len(span.tokens) for span in plan.spans]
            for job, _ in self.scheduler.commit(plan, self.memory.run(plan)):
                if job.num_tokens == job.num_prompt + limit:
                    self.scheduler.finish(job)
            check(self.scheduler)
        self.memory.run(self.scheduler.plan())
        return [job.tokens[: job.num_tokens - 1] for job in jobs]

    def kept(self):
        return sorted(node.end for node in self.snapshots.of(S))


PROMPT = np.arange(30, dtype=np.int32)


def test_a_breakpoint_has_a_state_wherever_it_is():
    server = Server(budget=1000, spacing=16)
    server.ask(PROMPT, stops=[5, 12, 26], breakpoints=[(12, 0.0), (26, 0.0)])
    assert {12, 26} <= {*server.kept()} and 5 not in server.kept()
    assert server.ask(np.array([*PROMPT[:12], *range(50, 70)], np.int32)) == 12
    bare = Server(budget=1000, spacing=16)
    bare.ask(PROMPT, stops=[5, 12, 26])
    assert bare.kept() == [26, 30]


def test_breakpoints_make_no_piece_that_is_too_small_for_its_bits():
    server = Server(budget=1000, recompute_last=4)
    server.ask(PROMPT, stops=[2, 8, 10, 20, 22], breakpoints=[(stop, 0.0) for stop in (2, 8, 10, 20)])
    assert server.pieces == [10, 10, 10], "22 is no breakpoint, and 8 has one close behind it"
    assert server.kept() == [10, 20, 30]


def test_a_state_that_another_request_has_left_makes_no_such_piece():
    server = Server(budget=1000, cells=400, recompute_last=4)
    server.answer_together(PROMPT, np.append(PROMPT[:12], PROMPT + 50), limit=1, marks=([10], [12]))
    assert sorted(server.pieces) == [10, 20, 32]


@pytest.mark.parametrize(("scattered_tokens", "is_saved"), [(0.0, True), (2.0, True), (4.0, False)])
def test_an_answer_that_takes_longer_to_save_than_to_compute_has_no_state(scattered_tokens, is_saved):
    server = Server(budget=1000, cells=400, scattered_tokens=scattered_tokens)
    turns = server.answer_together(PROMPT, PROMPT + 50, limit=20)
    assert server.kept() == ([49, 49] if is_saved else [])
    assert server.scheduler.tree.num_uncopied == (0 if is_saved else 2 * 49)
    spared = [server.ask(np.append(turn, np.full(at + 1, 5, np.int32))) for at, turn in enumerate(turns)]
    assert spared == ([49, 49] if is_saved else [0, 0])
    assert server.ask(np.append(turns[0], np.array([5, 6, 7], np.int32))) == 50, "it was computed alone now"


def test_prompts_share_the_runs_that_they_begin_with():
    server = Server(budget=100)
    server.ask(PROMPT, stops=[20])
    assert server.kept() == [20, 30] and server.snapshots.host.num_bytes == 30 + 2 * 5
    assert server.ask(np.append(PROMPT[:20], PROMPT[:4])) == 20
    assert server.kept() == [20, 24, 30] and server.snapshots.host.num_bytes == 34 + 3 * 5
    assert server.snapshots.drop(S) == 34 and server.snapshots.host.num_bytes == 0 and not server.snapshots.roots


def test_a_state_is_evicted_with_the_runs_that_only_it_needs():
    server = Server(budget=45)
    server.ask(PROMPT, stops=[20])
    server.ask(np.append(PROMPT[:20], PROMPT[:4]))
    assert server.kept() == [20, 24] and server.snapshots.host.num_bytes == 24 + 2 * 5


def test_the_state_that_saves_the_least_time_a_byte_is_evicted_first():
    server = Server(budget=45)
    server.ask(PROMPT[:25])
    server.ask(PROMPT[5:10])
    assert server.kept() == [5, 25] and server.snapshots.host.num_bytes == 40
    server.ask(PROMPT[10:20])
    assert server.kept() == [10, 25]


def test_a_prompt_that_is_longer_than_the_budget_leaves_the_rest_alone():
    server = Server(budget=30)
    server.ask(PROMPT[:20])
    server.ask(PROMPT[10:])
    server.ask(PROMPT)
    assert server.kept() == [20] and server.ask(PROMPT[10:]) == 0


def test_a_state_within_a_prompt_waits_for_a_second_one_and_is_evicted_before_newer_ones():
    server = Server(budget=1000)
    server.ask(PROMPT, stops=[10, 20])
    assert server.ask(np.append(PROMPT[:10], PROMPT[20:])) == 10
    for first in (3, 5):
        server.ask(np.roll(PROMPT, -first), stops=[12])
    server.ask(np.roll(PROMPT, -7), stops=[15])
    assert server.kept() == [10, 12, 15, 20, 30, 30, 30, 30], "the first 20 is gone, the second one is a prompt's end"
    assert server.ask(PROMPT) == 10


def test_a_state_that_is_taken_again_counts_as_gone_no_more_while_a_waiting_request_holds_its_run():
    server = Server(budget=1000)
    server.ask(PROMPT, stops=[10])
    node = server.snapshots.longest(S, PROMPT[:10])
    assert node is not None and node.copy is not None
    for first in (3, 5):
        server.ask(np.roll(PROMPT, -first), stops=[12])
    assert server.snapshots.aged == {node}
    node.copy.num_fetches += 1  # as a fetch of the run does
    server.ask(np.append(PROMPT[:10], PROMPT[20:]), stops=[10])
    assert node.state is not None and not server.snapshots.aged
    node.copy.num_fetches -= 1


# ---- Chats of short turns. -----------------------------------------------------------------------------------------------


def chat(server, turns, turn=10, first=0):
    """Lead a chat in which a turn has so many tokens; return what was spared of each prompt."""
    text = np.arange(first, first + turn * turns, dtype=np.int32)
    return [server.ask(text[: end * turn]) for end in range(1, turns + 1)]


def edited(tokens, at):
    """Return a prompt with other tokens from a position on."""
    return np.append(tokens[:at], np.arange(900, 905, dtype=np.int32))


def test_the_states_of_the_last_two_turns_stay_and_earlier_ones_only_where_they_are_apart():
    server = Server(budget=1000, spacing=20)
    assert chat(server, turns=8, turn=9) == [0, *range(9, 72, 9)]
    assert server.kept() == [18, 36, 54, 63, 72]
    assert server.ask(edited(np.arange(72), 63)) == 63, "another last question"
    assert server.ask(edited(np.arange(72), 50)) == 36, "an earlier one"


def test_turns_that_are_as_far_apart_as_states_may_be_all_stay():
    server = Server(budget=1000, spacing=20)
    chat(server, turns=6, turn=10)
    assert server.kept() == [10, 20, 30, 40, 50, 60], "without one of them a gap would be 20"


def test_the_state_of_an_earlier_turn_that_is_a_prompts_end_waits_for_no_second_one():
    server = Server(budget=1000, unused=0)
    chat(server, turns=4)
    assert {node.end for node in server.snapshots.passed} == {10, 20}
    assert server.ask(np.arange(20, dtype=np.int32), limit=3) == 10
    assert server.kept() == [10, 19, 20, 22, 30, 40]


def test_many_chats_do_not_evict_each_others_turns():
    server = Server(budget=10_000, cells=100, unused=2)
    for first in range(0, 1000, 100):
        chat(server, turns=4, first=first)
    assert [server.ask(edited(np.arange(first, first + 40), 30)) for first in range(0, 1000, 100)] == 10 * [30]


def test_the_turn_that_was_computed_ahead_replaces_the_end_of_the_answer():
    server = Server(budget=1000, spacing=8)
    chat(server, turns=2)
    request = Request(1, Fixed(PROMPT[:23]), 1, Scope.private(1), cache=False, snapshot_scope=S, kind=Kind.AHEAD)
    job = server.scheduler.submit(request)
    while job.num_tokens == job.num_prompt:
        plan = server.scheduler.plan()
        server.scheduler.commit(plan, server.memory.run(plan))
    server.scheduler.finish(job)
    server.memory.run(server.scheduler.plan())
    check(server.scheduler)
    assert server.kept() == [10, 23]


@pytest.mark.parametrize(
    ("states", "kept"), [(9, [20, 40, 60, 80, 100, 120, 140, 150, 160]), (5, [80, 120, 140, 150, 160]), (3, [130, 150, 160])]
)
def test_a_chat_under_a_small_budget_keeps_states_all_along_it(states, kept):
    """Of those that save equally little the oldest leaves, and the next one then saves twice as much."""
    server = Server(budget=160 + 200 * states, cells=400, spacing=8)
    server.snapshots.host.sizes = CopySizes(run_token=1, state=200)
    chat(server, turns=16)
    assert server.kept() == kept
    assert server.ask(edited(np.arange(160), 150)) >= 0.8 * 150


@pytest.mark.parametrize("stops", [(), (20, 60, 100)])
def test_earlier_turns_are_evicted_before_the_ends_of_other_chats(stops):
    """However much more each of them saves. stops: ends of texts within the turns, which no second prompt uses."""
    server = Server(budget=10_000, cells=400, spacing=8, unused=1)
    host = server.snapshots.host
    host.sizes = CopySizes(run_token=1, state=1000)
    server.ask(np.arange(200, 220, dtype=np.int32))
    for end in (40, 80, 120):
        server.ask(np.arange(end, dtype=np.int32), stops=[stop for stop in stops if stop < end])
    before, host.max_bytes = server.kept(), host.num_bytes + 20
    server.ask(np.arange(300, 320, dtype=np.int32))
    assert sorted([*server.kept(), 40]) == sorted([*before, 20])


# ---- What has come before comes again. -----------------------------------------------------------------------------------


def test_a_prompt_that_has_come_twice_has_a_state_in_front_of_its_last_tokens():
    server = Server(budget=1000, recompute_last=4, cells=200)
    assert [server.ask(PROMPT, limit=3) for _ in range(4)] == [0, 0, 26, 26]
    assert server.pieces[:1] == [30] and server.kept() == [26, 32]


def test_a_prompt_that_parts_from_an_earlier_one_has_a_state_there():
    server = Server(budget=1000, spacing=8)
    prompts = [np.append(PROMPT[:20], np.arange(at, at + 9, dtype=np.int32)) for at in (100, 200, 300)]
    assert [server.ask(prompt) for prompt in prompts] == [0, 0, 20]
    assert server.ask(edited(PROMPT, 26)) == 20
    assert 26 not in server.kept(), "there is a state close in front of it"


def test_the_state_where_prompts_part_makes_no_piece_that_is_too_small_for_its_bits():
    server = Server(budget=1000, recompute_last=4, spacing=8)
    server.ask(PROMPT)
    other = np.append(edited(PROMPT, 20), PROMPT[:8])
    server.pieces.clear()
    server.ask(other, stops=[8, 22], breakpoints=[(22, 0.0)])
    assert server.pieces == [8, 14, 11], "20 is too close to the client's breakpoint"
    server.pieces.clear()
    server.ask(np.append(other[:20], PROMPT), stops=[8, 24, 40])
    assert server.pieces == [12, 20, 10], "behind the state at 8; 24 is too close to 20"


def test_several_answers_to_a_prompt_share_a_state_in_front_of_its_last_tokens():
    server = Server(budget=1000, cells=200, spacing=8, recompute_last=4)
    prompt = Fixed(PROMPT, [30])
    requests = [Request(one, prompt, 2, Scope.private(one), cache=False, snapshot_scope=S) for one in range(3)]
    asked = [server.scheduler.submit(request) for request in requests]
    while not server.scheduler.idle:
        plan = server.scheduler.plan()
        for job, _ in server.scheduler.commit(plan, server.memory.run(plan)):
            if job.num_tokens == job.num_prompt + 2:
                server.scheduler.finish(job)
        check(server.scheduler)
    assert [job.reuse.cached for job in asked] == [0, 26, 26]


@pytest.mark.parametrize("stops, states", [([14, 29], [14]), ([13, 29], [13, 29]), ([14, 26], [14, 26]), ([29], [29])])
def test_a_short_last_question_gets_no_state_of_its_own(stops, states):
    """The tokens behind it, which open the answer, would be a batch of their own."""
    server = Server(budget=1000, spacing=4)
    server.ask(PROMPT, stops=stops, limit=2)
    assert server.kept() == [*states, 31], "the last token of an answer has no KV"


def test_a_short_question_after_what_is_cached_gets_no_state_unless_no_answer_follows():
    server = Server(budget=1000, spacing=4)
    server.ask(PROMPT)
    assert server.ask(np.append(PROMPT, PROMPT[1:16]), stops=[44], limit=2) == 30 and server.kept() == [30, 46]
    assert server.ask(np.append(PROMPT, PROMPT[2:5]), stops=[32]) == 30 and server.kept() == [30, 33, 46]
    assert server.ask(np.append(PROMPT, PROMPT[3:10]), stops=[36]) == 30 and server.kept() == [30, 33, 36, 37, 46]


def test_a_short_last_question_gets_a_state_where_answers_do_not_come_back_as_they_were():
    """A template may leave thoughts out of the history: then no turn computes the question in front of them again."""
    server = Server(budget=1000, cells=200, spacing=4)
    stops, cached = [10], []
    for _ in range(5):
        question = stops[-1] + 10
        cached.append(server.ask(np.append(np.arange(question), 0), stops=[*stops, question], limit=2))
        stops += [question, question + 5]
    assert cached == [0, 10, 35, 50, 65], "from the third turn on, the state behind the question before"


def test_equal_prompts_that_come_together_share_a_short_question():
    tree = PrefixTree(200, 8)
    snapshots = Snapshots(tree, HostMemory(1000, sizes=SIZES, cut=cut), spacing=4)
    scheduler, memory = Scheduler(tree, num_slots=3, **reuse_with(snapshots)), Memory(200, can_cut=False)
    prompt = Fixed(PROMPT, [14, 29, 30])
    requests = [Request(one, prompt, 2, Scope.private(one), cache=False, snapshot_scope=S) for one in range(3)]
    asked = [scheduler.submit(request) for request in requests]
    while any(job.num_tokens < job.num_prompt + 2 for job in asked):
        plan = scheduler.plan()
        scheduler.commit(plan, memory.run(plan))
        check(scheduler)
        for job in [one for one in scheduler.running if one.num_tokens == one.num_prompt + 2]:
            scheduler.finish(job)
    assert [job.reuse.cached for job in asked] == [0, 29, 29]


def test_a_state_counts_as_far_from_the_last_one_that_is_taken():
    server = Server(budget=1000, spacing=4)
    server.ask(PROMPT[:8], stops=[3, 6])
    assert server.kept() == [6, 8], "3 is too close to the beginning"


def test_an_answer_with_forced_tokens_takes_no_state_from_after_its_prompt():
    """Its own tail is there already: the state's runs would be held twice."""
    server = Server(budget=1000)
    answer = next_token((*PROMPT.tolist(),))
    server.ask(np.append(PROMPT, [answer, 1, 1]))
    assert server.ask(PROMPT, forced=[1, 1, 1]) == 0


def record(length):
    return Record(
        Scope.shared("s"), np.arange(length, dtype=np.int32), 0, np.zeros(length, np.uint8), state=np.zeros(5, np.uint8)
    )


def test_there_is_room_until_the_budget_is_spent():
    server = Server(budget=30)
    assert server.snapshots.host.has_room(record(25)) and not server.snapshots.host.has_room(record(26))
    server.ask(PROMPT[:20])
    assert server.snapshots.host.has_room(record(20)) and not server.snapshots.host.has_room(record(21))
    assert server.snapshots.host.put(record(20)) and not server.snapshots.host.put(record(21))
    assert server.snapshots.host.put(record(20)), "it is kept already"
    assert server.kept() == [20] and server.snapshots.host.num_bytes == 25


def test_without_a_budget_nothing_is_kept_whatever_its_size():
    server = Server(budget=0)
    server.snapshots.host.sizes = CopySizes()  # a failed warm-up: they are not known
    server.ask(PROMPT, stops=[20])
    assert not server.snapshots.roots


def test_what_came_in_after_a_run_that_was_never_made_goes_with_it():
    server = Server(budget=200)
    server.ask(PROMPT)
    node = server.snapshots.longest(S, PROMPT)
    assert node is not None and (whole := server.snapshots.host.get(node))
    server.snapshots.drop(S)
    request = Request(1, Fixed(PROMPT, [20]), 1, Scope.private(1), cache=False, snapshot_scope=S)
    job = server.scheduler.submit(request)
    while job.computed < 20:
        plan = server.scheduler.plan()
        server.scheduler.commit(plan, server.memory.run(plan))
    assert server.snapshots.host.put(whole), "behind a run whose copy is decided only"
    server.scheduler.recover()
    server.scheduler.finish(job)
    server.memory.apply(Clear())
    assert not server.kept()
    assert server.ask(PROMPT) == 0 and server.kept() == [30]


def test_what_is_forgotten_after_a_failure_is_not_written_any_more():
    server = Server(budget=200)
    server.snapshots.host.write_behind(Nothing())
    server.ask(PROMPT)
    assert server.snapshots.host.unsaved
    server.scheduler.recover(keep=False)
    assert not server.snapshots.host.take_unsaved() and not server.kept()


def test_a_preempted_request_does_not_go_on_from_a_state_of_a_tree_that_was_cleared():
    server = Server(budget=200)
    request = Request(1, Fixed(PROMPT, [20]), 2, Scope.private(1), cache=False, snapshot_scope=S)
    job = server.scheduler.submit(request)
    while job.computed < 20:
        plan = server.scheduler.plan()
        server.scheduler.commit(plan, server.memory.run(plan))
    server.scheduler._preempt()
    assert state_of(job).taken is not None
    server.scheduler.recover(keep=False)
    server.memory.apply(Clear())
    while job.num_tokens < job.num_prompt + 2:
        plan = server.scheduler.plan()
        server.scheduler.commit(plan, server.memory.run(plan))
        check(server.scheduler)
    server.scheduler.finish(job)
    check(server.scheduler)
    assert server.ask(PROMPT) > 0


def test_each_segment_of_a_prompt_is_looked_at_a_few_times_however_many_snapshots_it_has(monkeypatch):
    server, looks, compare = Server(budget=10_000, cells=1000, spacing=1, unused=1000), [], radix.common_prefix
    monkeypatch.setattr(radix, "common_prefix", lambda a, b: looks.append(a) or compare(a, b))
    stops = range(4, 400, 4)
    server.ask(np.arange(400, dtype=np.int32), stops)
    assert server.kept() == [*stops, 400] and len(looks) < 10 * len(stops)


def test_a_pin_of_a_long_prompt_looks_for_each_state_once(monkeypatch):
    server, looks = Server(budget=10_000, cells=1000), []
    stops = range(2, 400, 2)
    tokens = np.arange(400, dtype=np.int32)
    server.ask(tokens, stops)
    seconds = server.snapshots.profile.seconds
    monkeypatch.setattr(server.snapshots.profile, "seconds", lambda *run: looks.append(run) or seconds(*run))
    assert server.scheduler.pins.pin(S, tokens, 60) == 400
    assert len(looks) == len(server.kept()) < 20
    check(server.scheduler)
    assert server.scheduler.pins.unpin(S, tokens) and not server.snapshots.pinned


def test_by_last_use_too_the_states_of_an_ended_session_are_evicted_first():
    server = Server(1000)
    server.snapshots.host._policy = EvictionPolicy("lru")
    ended = np.arange(100, 130, dtype=np.int32)
    server.ask(ended, session="s")
    server.ask(PROMPT)
    assert server.snapshots.retire(S, ended, "s") == 30
    first = server.snapshots.host.candidates.pop()
    assert first is not None and first.tokens[0] >= 100 and first.host_priority == 0


def test_states_that_another_client_took_or_used_keep_their_worth_when_a_session_ends():
    server, tokens = Server(1000, cells=200), np.arange(200, 260, dtype=np.int32)
    server.ask(tokens[:30])
    assert server.ask(tokens, session="s") == 30
    worth = {node.end: (node.frequency, node.host_priority) for node in server.snapshots.of(S)}
    assert server.snapshots.retire(S, tokens, "s") == 30
    assert {node.end: (node.frequency, node.host_priority) for node in server.snapshots.of(S)}[30] == worth[30]
    server.ask(tokens)
    assert server.snapshots.retire(S, tokens, "s") == 0
