"""Work that waits for idle time: bounded in number and in bytes, since idle time may never come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Backlog(Generic[T]):
    """Items in order of arrival. Beyond its bounds the oldest leave."""

    def __init__(self, max_number: int, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_number, self._max_bytes = max_number, max_bytes
        self._items: dict[T, int] = {}  # with the bytes of each

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    @property
    def oldest(self) -> T:
        return next(iter(self._items))

    @property
    def newest(self) -> T:
        return next(reversed(self._items))

    def add(self, item: T, num_bytes: int) -> None:
        """Add an item that keeps `num_bytes` in memory, unless it alone exceeds the bound."""
        if num_bytes > self._max_bytes:
            return
        self._items[item] = num_bytes
        self.num_bytes += num_bytes
        while len(self) > self._max_number or self.num_bytes > self._max_bytes:
            self.remove(self.oldest)

    def remove(self, item: T) -> None:
        """Remove an item, if it is still here."""
        self.num_bytes -= self._items.pop(item, 0)

    def clear(self) -> None:
        self._items.clear()
        self.num_bytes = 0
