"""A draft model over the model of memory. It knows the next tokens, and a given share of its drafts is right."""

import numpy as np
from slotcache.models.times import CPU
from slotcache.slots.drafter import ModelDraft
from slotcache.slots.reuse import ids_of

from support.memory import next_token

PASS, TOKEN = 0.001, 0.0001  # seconds on its own clock, for one more token of each stream, and for each token read


class ToyDrafter:
    """The drafter. right: how many of ten tokens are right. batch: the tokens that it reads at once."""

    def __init__(self, right=10, batch=32):
        self.costs, self.batch = CPU, batch
        self.right, self.confidence = right, 0.9
        self.num_tokens, self.num_passes, self.is_off = 0, 0, False
        self.says_end = False  # each draft ends before its first token
        self.now = 0.0
        self.lengths = {}  # by request: the number of tokens read
        self.ahead = {}  # by slot: the number of tokens of its history read
        self.calls = []
        self.forgotten = []

    def clock(self):
        return self.now

    def lacking(self, job):
        return job.num_tokens - 1 - self.lengths.get(job.request.id, 0)

    def read(self, job, most):
        size = min(most, self.lacking(job))
        assert 0 < size <= self.batch
        self._take(job, size)
        self.now += TOKEN * size
        self.calls.append(("read", size))
        return True

    def read_ahead(self, slot, cached, most):
        size = min(most, cached - self.ahead.get(slot.id, 0))
        self.ahead[slot.id] = self.ahead.get(slot.id, 0) + size
        return size > 0

    def draft(self, jobs, lengths, goes_on):
        drafts = []
        for place, (job, length) in enumerate(zip(jobs, lengths, strict=True)):
            assert self.lacking(job) <= self.batch
            self._take(job, self.lacking(job))
            known, drafted = ids_of(job.tokens[max(job.num_tokens - 3, 0) : job.num_tokens]).tolist(), []
            while len(drafted) < length and not self.says_end:
                token = next_token(tuple([*known, *drafted][-3:]))
                is_right = (job.num_tokens + len(drafted)) * 7 % 10 < self.right
                drafted.append(token if is_right else (token + 1) % 5)
                if not goes_on(place, [self.confidence] * len(drafted)):
                    break
            drafts.append(ModelDraft(np.array(drafted, np.int32), (self.confidence,) * len(drafted)))
        passes = 1 if self.says_end else max(len(draft.tokens) for draft in drafts)
        self.now += PASS * passes
        self.num_passes += passes
        self.calls.append(("draft", [len(draft.tokens) for draft in drafts]))
        return drafts

    def forget(self, scope):
        self.forgotten.append(scope)

    def _take(self, job, size):
        self.num_tokens += size
        self.lengths[job.request.id] = self.lengths.get(job.request.id, 0) + size
