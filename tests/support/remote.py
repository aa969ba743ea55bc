"""A lower tier in the memory of this process: it stands for a store on another machine, and shows all that a tier takes."""

from threading import Lock

from slotcache.slots.record import file_name
from slotcache.slots.scope import Scope
from slotcache.slots.tier import Record


class Remote:
    """At most `max_bytes` of records; the oldest leave."""

    name = "remote"

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._records: dict[str, Record] = {}  # the newest last
        self._lock = Lock()
        self.num_written = self.num_refused = 0

    @property
    def num_bytes(self) -> int:
        return sum(len(one.data) for one in self._records.values())

    def __str__(self) -> str:
        return self.name

    def has_room(self, record: Record) -> bool:
        return self.num_bytes + len(record.data) <= self.max_bytes

    def put(self, record: Record) -> bool:
        with self._lock:
            self._records.pop(file_name(record), None)
            while self._records and not self.has_room(record):
                del self._records[next(iter(self._records))]
            if room := self.has_room(record):
                self._records[file_name(record)] = record
                self.num_written += 1
            return room

    def get(self, key: str) -> Record | None:
        return self._records.get(key)

    def drop(self, scope: Scope) -> None:
        with self._lock:
            self._records = {key: record for key, record in self._records.items() if record.scope.name != scope.name}

    def load(self, num_bytes: int) -> list[str]:
        chosen: dict[str, int] = {}
        with self._lock:
            for key, record in reversed(self._records.items()):
                num_bytes -= len(record.data)
                if num_bytes < 0:
                    break
                chosen[key] = record.start
        return sorted(chosen, key=lambda key: chosen[key])

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def close(self) -> None:
        """Nothing is pending."""
