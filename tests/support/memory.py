"""A model of llama.cpp's unified KV memory: cells with positions, the tokens that they were computed from, and sequences.

It carries out plans like the real memory. It fails where the real memory would give a wrong result: if a span's sequence
does not have exactly its own earlier tokens, if a position exists twice, or if the pool overflows.

A cell is a tuple of the codes of all tokens that its KV was computed from, up to its own position. The code of a token
combines its id and the adapters. The code of a token in a moved document also depends on the text that it was read in.
"""

from typing import Any

from slotcache.slots.plan import Clear, Drop, Load, Operation, Plan, Restore, Save, Share, Snap, Span, Trim
from slotcache.slots.reuse import FIRST, IDS, SEPARATE


class Memory:
    """The memory.

    can_cut: False for a hybrid model. Its sequences have cells and a recurrent state, which depends on all tokens. Copies
    of cells do not include the state.
    """

    def __init__(self, num_cells: int, can_cut: bool = True) -> None:
        self.num_cells, self.can_cut = num_cells, can_cut
        self.cells: dict[int, dict[int, tuple]] = {}  # sequence -> position -> the prefix that the cell was computed from
        self.identities: dict[tuple[int, int], int] = {}  # (sequence, position) -> which cell
        self.next_cell = 0
        self.states: dict[int, tuple] = {}  # sequence -> the tokens that its recurrent state depends on
        self.further: dict[int, list[int]] = {}  # request -> tokens that right drafts added in the last step

    def run(self, plan: Plan) -> list[int]:
        """Carry out a plan. Return the sampled tokens, which depend on the whole prefix, as in greedy decoding."""
        for operation in plan.operations:
            self.apply(operation)
        sampled = [self.compute(span, plan.adapters) for span in plan.spans]
        for operation in plan.afterwards:
            self.apply(operation)
        assert self.num_used <= self.num_cells, "the pool overflowed"
        return [token for token in sampled if token is not None]

    def apply(self, operation: Operation) -> None:
        assert self.can_cut or not isinstance(operation, Share | Trim), "a state cannot be cut"
        match operation:
            case Share(source, target, start, stop):
                theirs, mine = self.cells[source], self.cells.setdefault(target, {})
                assert not set(mine) & set(range(start, stop)), "a position would be held twice"
                for position in range(start, stop):
                    mine[position] = theirs[position]
                    self.identities[target, position] = self.identities[source, position]
            case Trim(sequence, start, stop):
                if sequence not in self.cells:  # the sequence was dropped, with a draft's end
                    return
                for position in range(start, stop):
                    del self.cells[sequence][position], self.identities[sequence, position]
            case Drop(sequence):
                for position in self.cells.pop(sequence, {}):
                    del self.identities[sequence, position]
                self.states.pop(sequence, None)
            case Clear():
                self.cells.clear()
                self.states.clear()
                self.identities.clear()
            case Save(sequence, copy):
                assert copy.data is None, "saved twice"
                cells: Any = [self.cells[sequence][position] for position in range(copy.start, copy.stop)]
                copy.data = cells
            case Restore(copy, sequence, start, stop, distance):
                assert self.num_used + stop - start <= self.num_cells, "no room for a restore"
                data: Any = copy.data
                assert [len(cell) - 1 for cell in data] == list(range(copy.start, copy.stop)), "a copy of other positions"
                mine = self.cells.setdefault(sequence, {})
                cells = cut(data, start - distance, stop - distance)
                for position, cell in zip(range(start, stop), cells, strict=True):
                    assert position not in mine, "a position would be held twice"
                    mine[position] = (*mine[position - 1], moved(cell)) if distance else cell
                    self.identities[sequence, position] = self.next_cell
                    self.next_cell += 1
                self.states.pop(sequence, None)
            case Snap(sequence, copy):
                state: Any = ["state", self.states[sequence]]
                assert len(self.states[sequence]) == copy.stop, "not the state it is kept as"
                copy.data = state
            case Load(copy, sequence):
                state: Any = copy.data
                assert len(self.cells[sequence]) == len(state[1]) == copy.stop, "a state of another length"
                self.states[sequence] = state[1]

    def compute(self, span: Span, adapters: str) -> int | None:
        mine = self.cells.setdefault(span.sequence, {})
        assert sorted(mine) == list(range(span.start)), "the sequence does not hold exactly what came before"
        prefix = mine[span.start - 1] if span.start else ()
        assert all(mine[position] == prefix[: position + 1] for position in range(span.start)), "a foreign cell"
        assert self.can_cut or self.states.get(span.sequence, ()) == prefix, "the state of other tokens"
        choices = []
        for offset, token in enumerate(seen(span.tokens.tolist(), adapters)):
            prefix = (*prefix, token)
            choices.append(next_token(prefix))
            mine[span.start + offset] = prefix
            self.identities[span.sequence, span.start + offset] = self.next_cell
            self.next_cell += 1
        self.states[span.sequence] = prefix
        if not span.logits:
            return None
        first, *further = choices[len(choices) - 1 - span.drafted :]
        right = [choice == drafted for choice, drafted in zip([first, *further], span.draft.tolist(), strict=False)]
        self.further[span.request] = further[: (*right, False).index(False)]
        return first

    def take_further(self, request: int) -> list[int]:
        return self.further.pop(request, [])

    @property
    def num_used(self) -> int:
        return len(set(self.identities.values()))


def cut(data: Any, start: int, stop: int) -> Any:
    """Return the part of a copy at positions [start, stop). A cell's position is the length of its prefix minus one."""
    assert len(data[0]) <= start + 1 and stop <= len(data[-1]), "a copy of other positions"
    return [cell for cell in data if start < len(cell) <= stop]


def seen(tokens: list[int], adapters: str) -> tuple[int, ...]:
    """Return the codes of tokens for a model with adapters. Documents that are read separately have marks in the tokens."""
    codes: list[int] = []
    front: tuple[int, ...] | None = None  # the text before the first document
    read: list[int] = []
    is_moved = False
    for token in tokens:
        code = (token & IDS) + 101 * len(adapters)
        if token & FIRST:
            front, read = tuple(codes) if front is None else front, []
            is_moved = len(codes) > len(front)
        if token & SEPARATE and front is not None:
            read.append(code)
            if is_moved:
                code = moved((*front, *read))
        codes.append(code)
    return tuple(codes)


def moved(text: tuple[int, ...]) -> int:
    """Return the code of a document's token that was read in `text`, of which it is the last, and moved elsewhere."""
    return abs(hash(text))


def next_token(prefix: tuple) -> int:
    """Return the greedy token after `prefix`. There are only five, so that paths often meet and part."""
    return sum(prefix[-3:]) * 7 % 5
