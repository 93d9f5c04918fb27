"""The keys and values of a changing batch of rows."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheShape:
    """The shape of the keys and values that a model keeps per token."""

    layers: int
    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the keys and values of one token take, over all layers."""
        return self.layers * 2 * self.heads * self.width * self.dtype.itemsize


class KeyValues:
    """Rows of cached tokens that all end at the same column, so that a step writes one column for the whole batch.

    Row r holds the columns [start(r), end). Rows come and go between steps. The last row is copied to the place of a
    row that leaves, so the rows in use are always the first ones.
    """

    def __init__(self, shape: CacheShape, rows: int) -> None:
        self._shape = shape
        self._capacity = rows
        """Number of rows that there is room for; more rows make the cache grow."""
        self.storage = torch.empty(0, 0, 0, 0, 0, 0)
        """(rows, layers, 2, heads, columns, width)."""
        self._hidden = torch.empty(0, 0)
        """(rows, columns): -inf before a row's start, else 0; to be added to attention scores."""
        self._starts: list[int] = []
        self._end = 0

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def positions(self) -> list[int]:
        """Position, in its own sequence, of the token that each row takes next."""
        return [self._end - start for start in self._starts]

    def add(self, prefix: Tensor, lengths: list[int], sources: list[int], room: int) -> None:
        """Append one row per entry of `sources`: the first `lengths[s]` tokens of `prefix[s]`.

        `prefix` is (S, layers, 2, heads, P, width), left-aligned; `room` is the number of tokens that the rows may
        still get.
        """
        longest = max((lengths[s] for s in sources), default=0)
        if not self._starts:
            self._end = longest
        rows = len(self._starts) + len(sources)
        end = max(self._end - self._first(), longest)
        if rows > self._capacity:
            self._capacity = max(rows, 2 * self._capacity)
        if self._capacity > len(self.storage) or longest > self._end or self._end + room > self.storage.shape[-2]:
            self._rebuild(end, room)
        for source, members in _runs(sources):
            start, row = self._end - lengths[source], len(self._starts)
            self.storage[row : row + members, ..., start : self._end, :] = prefix[source, ..., : lengths[source], :]
            self._hidden[row : row + members] = 0
            self._hidden[row : row + members, :start] = -torch.inf
            self._starts += [start] * members

    def column(self, room: int) -> tuple[Tensor, Tensor | None]:
        """Open a column for the next token of every row.

        Returns the cache (R, layers, 2, heads, t, width), whose last column the caller writes, and the numbers to add
        to attention scores, (R, 1, 1, t), or None if every row sees all t columns.
        """
        if self._end == self.storage.shape[-2]:
            self._rebuild(self._end - self._first(), room)
        self._end += 1
        rows, first = len(self._starts), self._first()
        cache = self.storage[:rows, ..., first : self._end, :]
        if max(self._starts) == first:
            return cache, None
        return cache, self._hidden[:rows, None, None, first : self._end]

    def clear(self, row: int) -> None:
        """Overwrite a row with zeros before it is taken out.

        Its memory may become hidden columns of another row, and these are multiplied by 0, so they must not hold NaN.
        """
        self.storage[row] = 0

    def remove(self, row: int) -> None:
        """Take a row out; the last row takes its number."""
        last = len(self._starts) - 1
        if row != last:
            start = self._starts[last]
            self.storage[row, ..., start : self._end, :] = self.storage[last, ..., start : self._end, :]
            self._hidden[row] = self._hidden[last]
            self._starts[row] = start
        self._starts.pop()

    def _first(self) -> int:
        return min(self._starts, default=self._end)

    def _rebuild(self, end: int, room: int) -> None:
        """Allocate the storage again, with `room` columns after `end`.

        The columns in use are moved to just before `end`.
        """
        shape, used, first = self._shape, len(self._starts), self._first()
        sizes = (self._capacity, shape.layers, 2, shape.heads, end + room, shape.width)
        # The storage begins with zeros: a hidden column is multiplied by 0, and uninitialised memory may hold NaN.
        storage = torch.zeros(sizes, dtype=shape.dtype, device=shape.device)
        hidden = torch.zeros((self._capacity, end + room), dtype=shape.dtype, device=shape.device)
        length = self._end - first
        if used:
            storage[:used, ..., end - length : end, :] = self.storage[:used, ..., first : self._end, :]
            hidden[:used, end - length : end] = self._hidden[:used, first : self._end]
            hidden[:used, : end - length] = -torch.inf
        self._starts = [start - first + end - length for start in self._starts]
        self.storage, self._hidden, self._end = storage, hidden, end


def _runs(values: list[int]) -> list[tuple[int, int]]:
    """Return (value, count) of each run of equal consecutive values."""
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return runs
