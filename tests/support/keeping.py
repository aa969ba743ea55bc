"""Adds KV outside the cache to `Life`: records in a lower tier, and slots that are saved, restored and erased."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from slotcache.slots.check import check
from slotcache.slots.plan import Clear
from slotcache.slots.radix import path, scope_of
from slotcache.slots.reuse import ids_of
from slotcache.slots.slot import Histories
from slotcache.slots.store.fetches import Fetches
from slotcache.slots.store.tier import WriteBehind

from support.asks import CONTEXT, Ask
from support.life import EXPECTED, SEEN, Life
from support.memory import seen
from support.remote import Remote

EXPECTED |= {"record", "adopt", "adopt in part", "restart", "save slot", "save of a part", "restore slot"}
EXPECTED |= {"restore of a part", "erase slot", "used what was restored", "remote", "fetched", "given up", "overdrawn"}
EXPECTED |= {"hole"}


class Keeping(Life):
    """Checks each record: it must have the KV of exactly its own tokens."""

    @initialize(most=st.sampled_from([1000, 1000, 20, 50]))
    def begin_with_nothing(self, most):
        """Begin with an empty lower tier. most: the bytes that it keeps; a record has one byte per token here."""
        self.tier, self.files = Remote(most), []
        self.written: set[tuple] = set()  # (scope, tokens up to a position) of all KV that was ever written

    def build(self, cells, host, states):
        super().build(cells, host, states)
        lower: Any = (self,)  # this object stands for a tier that is written to
        self.write_behind = WriteBehind(self.scheduler.index.host, lower)
        self.reads: list = []  # reads of records, which threads would do in a server
        self.fetches: Fetches | None = None

    def waits(self, job):
        if self.fetches is None:
            read, hand_over = self.reads.append, lambda act: act()
            self.fetches = Fetches(self.scheduler, [self.tier], hand_over=hand_over, read=read, clock=lambda: self.now)
            self.fetches.least = 60
        self.fetches.expect(job)

    def plan(self):
        return super().plan()

    def is_fetching(self, job):
        return self.scheduler.fetcher.is_fetching(job)

    @property
    def all_wait(self):
        return self.fetches is not None and self.fetches.seconds_left is not None

    def before_step(self):
        """If all open requests wait for records, let a record arrive or time pass."""
        if self.fetches is None:
            return
        self.fetches.look()
        check(self.scheduler)
        SEEN["overdrawn"] += self.scheduler.index.host.overdraft > 0
        while self.all_wait:
            if self.reads and self.now % 2:
                self.reads.pop(0)()
            self.now += 1
            self.fetches.look()
            check(self.scheduler)
        SEEN["given up"] += self.fetches.num_given_up > 0

    @rule(places=st.lists(st.integers(0, 9), max_size=4))
    def read(self, places):
        """Let records arrive, in any order."""
        for place in places:
            if self.reads and self.fetches:
                self.reads.pop(place % len(self.reads))()
                SEEN["fetched"] += self.fetches.num_hits > 0

    def slot_histories(self):
        carry_out = lambda: self.carry_out(self.tree.device.take_operations())  # noqa: E731
        return Histories(self.tree.device, self.scheduler.index, carry_out=carry_out)

    def ran(self):
        """Write new copies to the lower tier, as the server does after a step."""
        self.write_behind.write()

    def put(self, record):
        """Check a record, and pass it to the lower tier, which may refuse it."""
        assert record.scope.is_shared
        self.look_at(record)
        tokens = record.tokens.tolist()
        self.written |= {(record.scope, *tokens[:at]) for at in range(record.start + 1, len(tokens) + 1)}
        SEEN["record"] += 1
        return self.tier.put(record)

    @property
    def index(self):
        return self.tier.index

    def has_room(self, num_bytes):
        return self.tier.has_room(num_bytes)

    def __contains__(self, key):
        return key in self.tier

    @rule(places=st.lists(st.integers(0, 39), min_size=1, max_size=3))
    @precondition(lambda self: self.keys())
    def lose_records(self, places):
        """Lose records, as if they were damaged. Records that continue them may remain."""
        keys = self.keys()
        self.tier._forget([keys[place % len(keys)] for place in places])

    def end(self, job):
        super().end(job)
        SEEN["hole"] += job.reuse.has_hole

    def look_at(self, record):
        tokens = seen(record.tokens.tolist(), record.scope.adapters)
        cells = [tokens[: at + 1] for at in range(record.start, len(tokens))]
        assert record.data == cells, "not the KV of these tokens"
        assert record.state is None or record.state == ["state", tokens], "not the state behind them"

    def take_in(self, record, *source):
        """Put a record into host memory. Return whether it is cached now. source: the lower tier; empty for a saved slot."""
        if not self.can_cut:
            return self.snapshots.host.put(record, *source)
        before = self.tree.num_cached(record.scope, record.tokens)
        taken = self.tree.host.put(record, *source)
        length = self.tree.num_cached(record.scope, record.tokens)
        assert length == (len(record.tokens) if taken else before)
        SEEN["adopt in part"] += taken and record.start < before < len(record.tokens)
        return taken

    @rule(chosen=st.lists(st.integers(0, 39), min_size=1, max_size=6), ordered=st.sampled_from([True, True, False]))
    def adopt(self, chosen, ordered):
        """Bring records back, in any order, but most often prefixes first."""
        keys = self.keys()
        records = [self.record(keys[at % len(keys)]) for at in chosen if keys]
        if ordered:
            records.sort(key=lambda record: record.start)
        SEEN["adopt"] += sum([self.take_in(record, self.tier.name) for record in records])

    @rule(
        extra=st.integers(0, 60),
        host=st.sampled_from([0, 20, 60, 1000]),
        states=st.sampled_from([60, 1000]),
        share=st.sampled_from([0.0, 0.5, 1.0]),
    )
    @precondition(lambda self: self.keys())
    def restart(self, extra, host, states, share):
        """End the server, and start another one with other budgets, which brings back a share of the lower tier."""
        SEEN["restart"] += 1
        self.open.clear()
        self.memory.apply(Clear())
        self.build(CONTEXT + extra, host, None if self.can_cut else states)
        for key in self.keys()[: int(share * len(self.keys()))]:
            self.take_in(self.record(key), self.tier.name)

    def keys(self):
        """Return the keys of the lower tier, prefixes first."""
        return [entry.key for entry in sorted(self.tier.index.entries.values(), key=lambda entry: entry.start)]

    def record(self, key):
        record = self.tier.get(key)
        assert record is not None
        return record

    def let_go_by(self, act, scope):
        if act == "drop":
            self.tier.drop(scope)
            assert all(self.record(key).scope.name != scope.name for key in self.keys())
        return super().let_go_by(act, scope)

    def slot(self, number):
        """Return a slot if it is idle, else None."""
        slot = self.scheduler.slots[number % len(self.scheduler.slots)]
        return slot if slot.job is None else None

    @rule(number=st.integers(0, 3))
    def save_slot(self, number):
        if (slot := self.slot(number)) is None:
            return
        copied = self.tree.host.num_tokens
        records = self.slot_histories().save(slot)
        at = 0
        for record in records:
            self.look_at(record)
            assert record.start == at, "a gap"
            at = len(record.tokens)
        if self.can_cut and self.tree.host.max_bytes:
            assert at == self.tree.num_cached(slot.scope, slot.history) and self.tree.host.num_tokens == copied
        if records:
            self.files = [*self.files[-3:], records]
            SEEN["save slot"] += 1
            SEEN["save of a part"] += at < len(slot.history)

    @rule(number=st.integers(0, 3), of=st.integers(0, 3), steps=st.sampled_from([0, 0, 0, 1, 3]), use=st.booleans())
    @precondition(lambda self: self.files)
    def restore_slot(self, number, of, steps, use):
        """Restore a saved slot. steps: steps of other requests after the first record."""
        records = self.files[of % len(self.files)]
        taken = 0
        for record in records:
            if not self.take_in(record):
                break
            taken = len(record.tokens)
            for _ in range(steps if record is records[0] else 0):
                self.one_step()
        if (slot := self.slot(number)) is None:
            return
        scope, tokens = records[-1].scope, records[-1].tokens
        restored = self.slot_histories().remember(slot, scope, tokens)
        assert restored >= taken or steps or not self.can_cut
        SEEN["restore slot"] += restored == len(tokens)
        SEEN["restore of a part"] += 0 < restored < len(tokens)
        if use and restored and self.scheduler.idle:
            self.use_restored(scope, tokens[:restored].tolist())

    def use_restored(self, scope, tokens):
        """Check that a request which continues a restored slot computes none of it, or only the rest after it."""
        if ids_of(np.array(tokens, np.int32)).tolist() != tokens:
            return  # the prompt had documents that were read separately, so no plain prompt has its tokens
        self.histories.append(tokens)
        ask = Ask(of=1, share=1.0, fresh=[1], stops=set(), limit=1, scope=scope, cache=True, priority=0, background=False)
        if len(tokens) + 2 > CONTEXT:
            return
        self.submit_one(ask)
        job = self.open[-1]
        self.finish()
        if self.can_cut or self.recompute_last == 1:  # a state after the start of the rest cannot be used
            assert job.reuse.cached >= len(tokens) + 1 - self.recompute_last
        SEEN["used what was restored"] += 1

    def close(self):
        """Check that every copy in host memory was written."""
        self.ran()
        for node in self.tree.host.nodes:
            tokens = [token for one in [*path(node)][::-1] for token in one.tokens.tolist()]
            assert node.copy is not None
            if node.copy.source == "host" and node.copy.data and scope_of(node).is_shared:
                assert {(scope_of(node), *tokens[:at]) for at in range(node.start + 1, node.end + 1)} <= self.written
        super().close()

    @rule(number=st.integers(0, 3))
    def erase_slot(self, number):
        if (slot := self.slot(number)) is None:
            return
        pinned, ready = self.tree.device.num_in_use, self.tree.device.num_ready
        erased = self.slot_histories().erase(slot)
        assert self.tree.device.num_in_use == pinned <= self.tree.device.num_ready <= ready
        SEEN["erase slot"] += erased > 0
