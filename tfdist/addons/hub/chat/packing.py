"""Packs rows of tokens into rows of one length."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from tfdist.addons.hub.chat.rows import Row


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of items of at most some total length.

    The longest items come first, each into the fullest bin that it fits into: at most 11/9 of the least number of
    bins, plus 1 (Johnson et al. 1974).

    Args:
        lengths: The length of each item, at most `capacity`.
        capacity: The most of a bin.

    Returns:
        The places of the items of each bin.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    bins: list[list[int]] = []
    #: What is free in each open bin, with the bin, sorted.
    free: list[tuple[int, int]] = []
    for place in order:
        at = bisect.bisect_left(free, (lengths[place], -1))
        if at == len(free):
            bins.append([])
            room, chosen = capacity, len(bins) - 1
        else:
            room, chosen = free.pop(at)
        bins[chosen].append(place)
        if room > lengths[place]:
            bisect.insort(free, (room - lengths[place], chosen))
    return bins


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of tokens of one length.

    Attributes:
        ids: int32, [rows, length].
        documents: int32, [rows, length]: the number of the document of each token, from 1 in each row; 0 is padding.
        positions: int32, [rows, length]: the place of each token in its document.
        targets: int32, [rows, length]: the next token of the same document.
        weights: float32, [rows, length]: 1 where the target is trained.
    """

    ids: np.ndarray
    documents: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    weights: np.ndarray

    @property
    def padding(self) -> float:
        """The share of the tokens that is padding."""
        return float((self.documents == 0).mean())


def packed(rows: Sequence[Row], length: int, *, pad: int = 0, pack: bool = True) -> Batch:
    """The rows as arrays, several in a row of the result if that is wanted.

    Args:
        rows: The rows, of at most `length` tokens.
        length: The tokens of a row of the result.
        pad: The id of padding.
        pack: Whether rows are packed; otherwise each is a row of the result.
    """
    lengths = [len(row) for row in rows]
    bins = best_fit_decreasing(lengths, length) if pack else [[place] for place in range(len(rows))]
    shape = (len(bins), length)
    ids, targets = np.full(shape, pad, "int32"), np.full(shape, pad, "int32")
    documents, positions = np.zeros(shape, "int32"), np.zeros(shape, "int32")
    weights = np.zeros(shape, "float32")
    for at, members in enumerate(bins):
        begin = 0
        for number, place in enumerate(sorted(members), start=1):
            row = rows[place]
            end = begin + len(row)
            ids[at, begin:end] = row.ids
            targets[at, begin : end - 1] = row.ids[1:]
            weights[at, begin : end - 1] = row.trained[1:]
            documents[at, begin:end] = number
            positions[at, begin:end] = range(len(row))
            begin = end
    return Batch(ids, documents, positions, targets, weights)


def batches(batch: Batch, size: int) -> Iterator[Batch]:
    """Batches of some rows, without the last incomplete one."""
    for begin in range(0, len(batch.ids) - size + 1, size):
        fields = dataclasses.fields(Batch)
        yield Batch(*(getattr(batch, field.name)[begin : begin + size] for field in fields))
