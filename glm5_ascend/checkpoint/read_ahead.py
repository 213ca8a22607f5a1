"""Reading ahead: the system reads the tensors of the next tasks into its cache while the present ones compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from glm5_ascend.files.cgroups import available_memory

Item = TypeVar("Item")
#: Bytes asked for before they are needed, at most, and as a share of the memory that is available: the system can give
#: away what they take, but then reads them twice.
AHEAD, SHARE = 2**32, 0.25


class Files(Protocol):
    """Checkpoints that can be read ahead by full names of tensors."""

    def read_ahead(self, name: str) -> int: ...


class ReadAhead(Generic[Item]):
    """Iterates over `items` once; reading starts when the object is made and stays some bytes ahead, see `AHEAD`.

    Args:
        names: gives the full names of an item's tensors.
    """

    def __init__(self, files: Files, items: Iterable[Item], names: Callable[[Item], Iterable[str]]) -> None:
        self._files, self._items, self._names = files, iter(items), names
        self._waiting: deque[tuple[Item, int]] = deque()
        self._size, self._most = 0, max(1, min(AHEAD, int(SHARE * available_memory())))
        self._fill()

    def __iter__(self) -> Iterator[Item]:
        while self._waiting:
            item, size = self._waiting.popleft()
            self._size -= size
            self._fill()
            yield item

    def _fill(self) -> None:
        for item in self._items if self._size < self._most else ():
            size = sum(map(self._files.read_ahead, self._names(item)))
            self._waiting.append((item, size))
            self._size += size
            if self._size >= self._most:
                break
