"""A lower tier in this process's memory. It stands for a store on another machine, and shows all that a tier needs."""

from threading import Lock

from slotcache.slots.record import Record, file_name
from slotcache.slots.scope import Scope
from slotcache.slots.store.record_index import RecordIndex


class Remote:
    """A tier of at most `max_bytes` of records. The oldest records are evicted."""

    name = "remote"

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.index = RecordIndex()
        self._records: dict[str, Record] = {}  # newest last
        self._lock = Lock()
        self.num_written = self.num_refused = 0

    @property
    def num_bytes(self) -> int:
        return sum(len(one.data) for one in self._records.values())

    def __str__(self) -> str:
        return self.name

    def has_room(self, num_bytes: int) -> bool:
        return num_bytes <= self.max_bytes

    def put(self, record: Record) -> bool:
        with self._lock, self.index.lock:
            self._forget([file_name(record)])
            while self._records and self.num_bytes + len(record.data) > self.max_bytes:
                self._forget([next(iter(self._records))])
            if room := self.has_room(len(record.data)):
                self._records[key := file_name(record)] = record
                self.index.add(
                    key,
                    record.scope,
                    record.start,
                    record.tokens,
                    size=len(record.data),
                    used=0,
                    documents=record.documents,
                    has_state=record.state is not None,
                )
                self.num_written += 1
            return room

    def _forget(self, keys) -> None:
        for key in keys:
            if self._records.pop(key, None):
                self.index.remove(self.index.entries[key])

    def get(self, key: str) -> Record | None:
        return self._records.get(key)

    def drop(self, scope: Scope) -> None:
        with self._lock, self.index.lock:
            self._forget([key for key, record in self._records.items() if record.scope.name == scope.name])

    def wait(self) -> None:
        """Return at once: the tier is empty at the start."""

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def close(self) -> None:
        """Do nothing: no write is pending."""
