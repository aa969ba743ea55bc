"""Snapshots: saved states of recurrent and hybrid models, whose state cannot be cut at a prefix.

A recurrent state stands for exactly the tokens that led to it, so only a prompt that starts with all of these tokens can use
it. In a hybrid model, the KV of the attention layers can be cut at any position. So the KV of these layers is kept run by
run, each run only once, and a state is a small object at the end of a run. States are taken where later prompts are likely
to diverge: at the ends of documents, questions and answers, and where an earlier prompt has diverged. A prompt continues
from the deepest state of its prefix: this state and the runs before it are restored to the prompt's sequence. llama-server's
context checkpoints are similar, but each of them contains the whole state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .cells import Cells
from .counters import Counters
from .host import HostMemory, restores
from .job import Job, StrategyState
from .plan import HostCopy, Load, Save, Snap, Span
from .prefix_tree import PrefixTree
from .radix import Node, path, upward
from .request import Layout, Request
from .reuse import Source
from .state_tree import StateTree
from .strategy import PlainKV

SPACING = 64  # tokens between two states of a prompt
QUESTION = 4  # times the spacing: the tokens of a last question from which a state after it is worth one more batch
UNUSED = 64  # states inside prompts that wait for a second prompt; this many more for each one dropped too early


@dataclass(slots=True, eq=False)
class SnapshotState(StrategyState):
    """The snapshots of a job.

    stops: the positions where the job's prefill pauses for a snapshot.
    taken: the run that ends where the job's last snapshot was taken, even if this snapshot is gone.
    """

    stops: tuple[int, ...] = ()
    taken: Node | None = None

    def forget_unmade(self) -> None:
        """Forget which run the last snapshot belongs to: the run may no longer be in the tree."""
        self.taken = None


def state_of(job: Job) -> SnapshotState:
    """Return the `SnapshotState` of a job."""
    if not isinstance(job.strategy_state, SnapshotState):
        job.strategy_state = SnapshotState()
    return job.strategy_state


class Snapshots(StateTree):
    """Takes states of running requests, and restores them.

    tree: the prefix tree, which has the sequences.
    host: host memory. If its budget is 0, no states are kept.
    spacing: the fewest tokens between two states of a prompt; for exceptions, see `stops`.
    unused: how many states inside prompts are kept that no second prompt has used yet. The limit is raised when a state that
        was dropped because of the limit had to be taken again.
    """

    def __init__(self, tree: PrefixTree, host: HostMemory, *, spacing: int = SPACING, unused: int = UNUSED) -> None:
        super().__init__(tree.costs, host, tree.profile)
        self.num_taken = 0  # states, ever
        self.num_loaded = 0  # states, ever
        self._tree, self._spacing, self._most_unused = tree, max(spacing, tree.recompute_last), unused

    def stops(self, job: Job, waiting: Iterable[Job] = ()) -> tuple[int, ...]:
        """Return the positions at which to take states while the rest of a prompt is computed.

        The positions are ends of the prompt's segments, and the position where an earlier prompt ended or diverged.
        Positions close to another one are left out.

        To take a state after a short last question, the few tokens of the prompt that follow the question need a batch of
        their own. Usually a state after the question does not pay: the next turn continues from the state after the answer,
        and prompts with other questions diverge at the start of this question. A state after the question pays if the next
        turn contains the answer in a changed form, if no answer follows, or if another request may wait for the same prompt.

        A state is taken at each breakpoint of the client, unless fewer than `recompute_last` tokens follow before the next
        breakpoint or the prompt's end.
        """
        last, least = job.num_prompt - self._tree.recompute_last, job.computed + self._spacing
        marked = {stop for stop, _ in job.layout.breakpoints if stop > job.computed}
        ends = [stop for stop in job.layout.stops if (stop >= least or stop in marked) and stop < job.num_prompt]
        if ends and ends[-1] not in marked and job.num_prompt - ends[-1] < self._spacing:
            question = ends[-1] - [job.computed, *ends][-2]
            if question < self._spacing * (QUESTION if _is_passed_by(job, waiting) else 1):
                ends.pop()
        chosen: list[int] = []
        for stop in reversed([stop for stop in ends if stop <= last]):
            space = self._tree.recompute_last if stop in marked else self._spacing
            if stop in marked and chosen and chosen[-1] not in marked and chosen[-1] - stop < space:
                chosen.pop()
            if not chosen or chosen[-1] - stop >= space:
                chosen.append(stop)
        return self._with_branch(job, chosen[::-1], marked, waiting)

    def _with_branch(self, job: Job, stops: list[int], marked: set[int], waiting: Iterable[Job]) -> tuple[int, ...]:
        """Add to `stops` the position up to which an earlier prompt had the same tokens, unless a state is close to it.

        A prefix that was sent twice is likely to be sent again. The cache Marconi, too, admits a state if its prefix was
        sent twice (Pan et al. 2024). If the whole prompt was sent before, or another waiting request has it, too, the state
        is taken before the last tokens of the prompt, which are always computed.
        """
        is_awaited = any(other.request.prompt is job.request.prompt for other in waiting)
        known = job.num_prompt if is_awaited else self.match(job.request.snapshot_scope, job.tokens[: job.num_prompt]).length
        at = min(known, job.num_prompt - self._tree.recompute_last)
        if at - max([job.computed, *(stop for stop in stops if stop <= at)]) < self._spacing:
            return tuple(stops)
        further = [stop for stop in stops if stop > at and (stop in marked or stop - at >= self._spacing)]
        if further and further[0] - at < self._tree.recompute_last:
            return tuple(stops)
        return (*(stop for stop in stops if stop < at), at, *further)

    def strategy(self, tree: PrefixTree, cells: Cells, counters: Counters) -> FromSnapshots:
        """Return the strategy by which requests reuse snapshots: see `Scheduler`."""
        return FromSnapshots(tree, cells, counters, self)

    def load(self, job: Job) -> tuple[str, int]:
        """Restore the deepest state of a prompt's prefix, and the runs before this state, to the request's sequence.

        Return the state's origin, and how many tokens the sequence gains. No state inside the answer is restored: the tokens
        of an answer are private, even if a grammar forces several of them at once.
        """
        assert job.sequence is not None
        begin = job.sequence.length
        tokens = job.tokens[: max(min(job.num_tokens - self._tree.recompute_last, job.claimed), 0)]
        node = self.longest(job.request.snapshot_scope, tokens, self._known(job, len(tokens)))
        if node is None or node.end <= begin:
            return Source.NONE, 0
        assert node.state is not None
        self._count_use(node, job)
        for restore, _ in restores(node, job.sequence.id, begin):
            self._tree.device.perform(restore)
        self._tree.device.perform(Load(node.state, job.sequence.id))
        self._tree.device.advance(job.sequence, node.end)
        self.num_loaded += 1
        source, node.state.source = node.state.source, Source.SNAPSHOT  # its place from now on
        return source, node.end - begin

    def take(self, job: Job) -> None:
        """Save the current state of a request's sequence, and the runs before it, if an empty budget could hold them."""
        assert job.sequence is not None
        scope, tokens = job.request.snapshot_scope, job.tokens[: job.computed]
        if scope is None or not len(tokens) or not self.host.could_hold(len(tokens)):
            return
        origin = self._known(job, len(tokens)) or self.root(scope)
        begin, layout = origin.end, job.layout
        documents = [document for document in layout.documents if begin <= document.start and document.stop <= len(tokens)]
        ends = {at for document in documents for at in (document.start, document.stop)}
        stops = sorted(at - begin for at in {*layout.stops, *ends} if at > begin)
        nodes = self.insert(origin, tokens[begin:], stops)
        for document in documents:
            nodes[document.start - begin].place(document.key, nodes[document.stop - begin])
        node = nodes[len(tokens) - begin]
        for run in path(node, origin.end):
            run.note_session(job.request.session)
        new = [run for run in path(node, origin.end) if run.copy is None]
        for run in reversed(new):
            self.host.keep(run, copy := HostCopy(run.start, run.end))
            self._tree.device.perform(Save(job.sequence.id, copy))
        if not any(document.start < node.end < document.stop for document in layout.documents):
            state_of(job).taken = node
        if node.state is None:
            self._most_unused += UNUSED * (node in self.aged)
            self.host.keep(node, state=(state := HostCopy(0, node.end, source=Source.SNAPSHOT)))
            self.num_taken += 1
            self._tree.device.perform(Snap(job.sequence.id, state))
            node.frequency += job.request.kind.counts_as_use
            self._thin_out(node, job)
        self.make_room(node)

    def pays(self, job: Job) -> bool:
        """Return whether saving a request's tokens since its last state takes less time than computing them again.

        If an answer was computed in steps with other requests, its cells are copied one by one: see `Copies.pays`.
        """
        assert job.sequence is not None
        price = self._tree.device.stretches.of(job.sequence) * self.costs.scattered_tokens
        if not price:
            return True
        node = self.longest(job.request.snapshot_scope, job.tokens[: job.computed], self._known(job, job.computed))
        since = job.computed - (node.end if node is not None else 0)
        is_worth_it = price <= since
        self._tree.num_uncopied += 0 if is_worth_it else since
        return is_worth_it

    def _known(self, job: Job, length: int) -> Node | None:
        """Return the run of a request's last snapshot, if the run is still there and ends within the first `length` tokens.

        A search that begins at this run need not walk the whole prompt again.
        """
        node = state_of(job).taken
        return node if node is not None and node.copy is not None and node.end <= length else None

    def _count_use(self, node: Node, job: Job) -> None:
        """Count a request's use of a state. The next turn of the same conversation, or a prefill for it, does not count."""
        self._clock += 1
        for run in path(node):
            run.note_session(job.request.session)
        self.passed.discard(node)
        is_new = job.request.kind.counts_as_use and job.request.follows is None
        node.frequency += is_new and bool(node.children)
        if node.frequency > 1:
            self.unused.pop(node, None)
        self.price(node)

    def _thin_out(self, node: Node, job: Job) -> None:
        """A new state was taken. Forget earlier states that no second prompt has used, and that are now worth little.

        node: the node with the new state.

        The last two turns of a chat keep their states: the next turn continues from the last state, and another version of
        the last question continues from the state before it. A prefill of the next turn replaces the state at the answer's
        end, because every next turn has the prefilled tokens. A state inside a prompt is kept for some time, since a second
        prompt uses it soon or not at all.
        """
        states = (one for one in upward(node) if one is not node and one.state is not None)
        if (above := next(states, None)) is None:
            return
        if not job.request.kind.is_client and node.end - above.end < self._spacing:
            if _is_passed(above):
                self.forget(above)
        elif above.end != job.started_at or above.document_of:
            self._wait_for_second(above)
        else:
            self._pass_over(above, states)

    def _pass_over(self, last: Node, states: Iterator[Node]) -> None:
        """After two later turns of a chat, forget the state of a turn, or lower its worth.

        The state is forgotten if only a small gap is then left between the states before and after it. If the gap would be
        larger, the state's worth is lowered.

        last: the node with the state of the first of the two later turns.
        states: the states before `last`, nearest first.
        """
        below = last
        for node in states:
            if not (node.document_of or node in self.unused):
                break
            below = node
        else:
            return
        if not _is_passed(node):
            return
        further = next(states, None)
        if below.end - (further.end if further is not None else 0) < self._spacing:
            self.forget(node)
        else:
            self.passed.add(node)
            self.revalue(node)

    def _wait_for_second(self, node: Node) -> None:
        """Keep a state inside a prompt until a second prompt uses it.

        If too many such states wait for a second prompt, forget the oldest of them.
        """
        if node.frequency > 1 or node.pinned_until or node in self.passed:
            return
        self.unused[node] = None
        while len(self.unused) > self._most_unused:
            oldest = next(iter(self.unused))
            del self.unused[oldest]
            if oldest.children and not oldest.pinned_until:  # without children it is a prompt's end by now
                self.forget(oldest)
                self.aged.add(oldest)


def _is_passed(node: Node) -> bool:
    """Return whether a state need not be kept: one prompt has continued from it, no document ends there, it has no pin."""
    return node.frequency < 2 and len(node.children) == 1 and not (node.pinned_until or node.document_of)


def _is_passed_by(job: Job, waiting: Iterable[Job]) -> bool:
    """Return whether later prompts are likely to continue from the answer only, and not from the last question."""
    is_alone = not any(other.request.shares_with(job.request) for other in waiting)
    return job.request.limit > 1 and is_alone and not _repeats_an_answer(job)


def _repeats_an_answer(job: Job) -> bool:
    """Return whether a prompt has to compute the previous answer again, for example because its reasoning was dropped."""
    stops, documents = job.layout.stops, {document.stop for document in job.layout.documents}
    later = [stop for stop in stops if job.computed < stop < job.num_prompt]
    return job.computed in stops and not documents.issuperset(later[:-1])


class FromSnapshots(PlainKV):
    """The strategy for models whose state cannot be cut at a prefix: requests reuse states and the runs before them."""

    def __init__(self, tree: PrefixTree, cells: Cells, counters: Counters, snapshots: Snapshots) -> None:
        super().__init__(tree, cells, counters)
        self._snapshots = snapshots

    def takes(self, request: Request, whole: Layout) -> bool:
        return request.snapshot_scope is not None

    def begin(self, job: Job, waiting: Iterable[Job]) -> None:
        super().begin(job, waiting)
        self._load(job, job.num_tokens)
        job.started_at, state_of(job).stops = job.computed, self._snapshots.stops(job, waiting)

    def catch_up(self, job: Job, num_cells: int) -> None:
        self._load(job, num_cells + job.num_tokens - job.computed)

    def bring_back(self, job: Job, num_cells: int) -> None:
        self._load(job, num_cells + job.num_tokens - job.computed)

    def pause_at(self, job: Job, at: int) -> None:
        """Let the job's prefill pause at position `at`; 0: do not pause.

        Drop stops that are fewer than `recompute_last` tokens away from `at` or from the job's current position.
        """
        state = state_of(job)
        state.pause = at
        ends = (job.computed, at)
        state.stops = tuple(stop for stop in state.stops if all(abs(stop - end) >= job.recompute_last for end in ends))

    def next_stop(self, job: Job) -> int:
        state = state_of(job)
        return min((stop for stop in (*state.stops, state.pause) if stop > job.computed), default=job.num_tokens)

    def sharable(self, leader: Job, upto: int) -> int:
        return max((stop for stop in state_of(leader).stops if stop <= upto), default=0)

    def reached(self, job: Job, span: Span) -> bool:
        state = state_of(job)
        if job.computed in (*state.stops, state.pause):
            self._snapshots.take(job)
        return False

    def release(self, job: Job) -> None:
        if self._snapshots.host.max_bytes and self._snapshots.pays(job):
            self._snapshots.take(job)
        super().release(job)

    def _load(self, job: Job, num_cells: int) -> None:
        """Let the job continue from the deepest state of its prompt, if `num_cells` cells can be freed."""
        if self._cells.reserve(num_cells):
            source, gained = self._snapshots.load(job)
            if gained:
                self._count(job, source, job.computed, gained)
                job.computed += gained
