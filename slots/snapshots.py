"""Snapshots, for models whose memory cannot be cut (recurrent and hybrid ones): states behind prompts, over runs of KV.

A recurrent state stands for exactly the tokens that led to it, so only a prompt that begins with all of them can use it. The
KV of a hybrid's attention layers can be cut, so it is kept run by run, each run once, and a state is a small record at the
end of one. States are taken where a later prompt may part from this one: at the ends of documents, questions and answers. A
prompt continues from the deepest state that it begins with; the runs in front of that and the state are put together in its
sequence. llama-server keeps whole states, and calls them context checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .host import HostMemory, restores
from .plan import HostCopy, Load, Save, Snap
from .prefix_tree import PrefixTree
from .radix import Node, path, upward
from .request import Request
from .source import Source
from .state_tree import StateTree

SPACING = 64  # tokens between two states of a prompt
QUESTION = 4  # times the spacing: the fewest tokens of a last question for which a state behind it is worth a batch more
UNUSED = 64  # states within prompts that wait for a second prompt; as many more for each that leaves too early


class Snapshots(StateTree):
    """Takes states of running requests and brings them back.

    tree: has the ledger of the sequences. host: keeps nothing if it has no budget. spacing: the fewest tokens between two
    states of a prompt, but for its end. unused: states within prompts that may wait for a second one; more where such
    states leave and have to be taken again.
    """

    def __init__(self, tree: PrefixTree, host: HostMemory, *, spacing: int = SPACING, unused: int = UNUSED) -> None:
        super().__init__(tree.costs, host, tree.profile)
        self.num_taken = 0  # states, ever
        self.num_loaded = 0  # states, ever
        self._tree, self._spacing, self._most_unused = tree, max(spacing, tree.rest), unused

    def stops(self, request: Request, waiting: Iterable[Request] = ()) -> tuple[int, ...]:
        """Return the positions of states to take while the rest of a prompt is computed: ends of its segments, well apart.

        A state behind a short last question is not worth a batch for the few tokens that open the answer: the next turn
        continues from the state behind the answer, and other questions part from this one at its beginning. It is worth one
        where answers do not come back as they were, where none follows (the prompt is there to be continued), and where
        another request may wait for the same prompt: another answer to it, say.
        """
        assert request.layout is not None
        last, least = request.num_prompt - self._tree.rest, request.computed + self._spacing
        ends = [stop for stop in request.layout.stops if least <= stop < request.num_prompt]
        if ends and request.num_prompt - ends[-1] < self._spacing:
            question = ends[-1] - [request.computed, *ends][-2]
            if question < self._spacing * (QUESTION if _is_passed_by(request, waiting) else 1):
                ends.pop()
        chosen: list[int] = []
        for stop in reversed([stop for stop in ends if stop <= last]):
            if not chosen or chosen[-1] - stop >= self._spacing:
                chosen.append(stop)
        return tuple(reversed(chosen))

    def load(self, request: Request) -> tuple[str, int]:
        """Bring the deepest state that a request's prompt begins with into its sequence, with the runs in front of it.

        Return its origin, and how many tokens it spares behind those that the sequence has. Nothing comes back behind the
        prompt: the tail of an answer is the request's own, also where a grammar forces several tokens of it at once.
        """
        assert request.sequence is not None
        begin = request.sequence.length
        tokens = request.tokens[: max(min(request.num_tokens - self._tree.rest, request.claimed), 0)]
        node = self.longest(request.snapshot_scope, tokens, self._known(request, len(tokens)))
        if node is None or node.end <= begin:
            return Source.NONE, 0
        assert node.state is not None
        self._count_use(node, request)
        for restore, _ in restores(node, request.sequence.id, begin):
            self._tree.ledger.perform(restore)
        self._tree.ledger.perform(Load(node.state, request.sequence.id))
        self._tree.ledger.advance(request.sequence, node.end)
        self.num_loaded += 1
        return node.state.source, node.end - begin

    def take(self, request: Request) -> None:
        """Keep the present state of a request's sequence, and the runs up to it, if the budget has room for that path."""
        assert request.sequence is not None and request.layout is not None
        scope, tokens = request.snapshot_scope, request.tokens[: request.computed]
        if scope is None or not len(tokens) or not self.host.could_hold(len(tokens)):
            return
        origin = self._known(request, len(tokens)) or self.root(scope)
        begin, layout = origin.end, request.layout
        documents = [document for document in layout.documents if begin <= document.start and document.stop <= len(tokens)]
        ends = {at for document in documents for at in (document.start, document.stop)}
        stops = sorted(at - begin for at in {*layout.stops, *ends} if at > begin)
        nodes = self.insert(origin, tokens[begin:], stops)
        for document in documents:
            nodes[document.start - begin].place(document.key, nodes[document.stop - begin])
        node = nodes[len(tokens) - begin]
        new = [run for run in path(node, origin.end) if run.blob is None]
        for run in reversed(new):
            self.host.keep(run, blob := HostCopy(run.start, run.end))
            self._tree.ledger.perform(Save(request.sequence.id, blob))
        if not any(document.start < node.end < document.stop for document in layout.documents):
            request.taken = node
        if node.state is None:
            self._most_unused += UNUSED * (node in self.aged)
            self.host.keep(node, state=(state := HostCopy(0, node.end, source=Source.SNAPSHOT)))
            self.num_taken += 1
            self._tree.ledger.perform(Snap(request.sequence.id, state))
            node.frequency += not request.guess
            self._thin_out(node, request)
        self.make_room(node)

    def _known(self, request: Request, length: int) -> Node | None:
        """Return the run of a request's last snapshot, if it is kept and among its first `length` tokens.

        A search that begins there does not pass all segments of a prompt at each of its steps.
        """
        node = request.taken
        return node if node is not None and node.blob is not None and node.end <= length else None

    def _count_use(self, node: Node, request: Request) -> None:
        """Count a request that begins with a state. The next turn of a conversation does not count again."""
        self._clock += 1
        node.frequency += bool(node.children) and not request.guess
        if node.frequency > 1:
            self.unused.pop(node, None)
        self.price(node)

    def _thin_out(self, node: Node, request: Request) -> None:
        """Forget states that count for little beside a new one.

        Such is the one that the request has continued from, if it is close and no other prompt has used it. And within
        prompts, states that no second prompt has used: it comes soon or not at all. The last state of a prompt stays.
        """
        above = next((one for one in upward(node) if one is not node and one.state is not None), None)
        if above is None or above.frequency > 1 or above.pinned_until:
            return
        is_close = above.end == request.started_at and node.end - above.end < self._spacing
        if is_close and len(above.children) == 1 and not above.document_of:
            self.forget(above)
            return
        self.unused[above] = None
        while len(self.unused) > self._most_unused:
            oldest = next(iter(self.unused))
            del self.unused[oldest]
            if oldest.children and not oldest.pinned_until:  # without children it is a prompt's end by now
                self.forget(oldest)
                self.aged.add(oldest)


def _is_passed_by(request: Request, waiting: Iterable[Request]) -> bool:
    """Return whether nothing is likely to continue from the end of a prompt's last question: only from its answer."""
    is_alone = all(other.index_scope != request.index_scope for other in waiting)
    return request.limit > 1 and is_alone and not _repeats_an_answer(request)


def _repeats_an_answer(request: Request) -> bool:
    """Return whether a prompt computes the answer before its last question again: a template leaves out thoughts, say."""
    assert request.layout is not None
    stops, documents = request.layout.stops, {document.stop for document in request.layout.documents}
    behind = [stop for stop in stops if request.computed < stop < request.num_prompt]
    return request.computed in stops and not documents.issuperset(behind[:-1])


def next_stop(stops: Sequence[int], computed: int) -> int | None:
    """Return the first of these ascending stops behind position `computed`."""
    return next((stop for stop in stops if stop > computed), None)
