"""The bytes that a rank sends and receives."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from tfdist.backend.native import functions


class Traffic(NamedTuple):
    """The total numbers of bytes of tensors.

    Attributes:
        sent: Bytes that this process has sent peer to peer.
        received: Bytes that it has received.
    """

    sent: int
    received: int


def traffic() -> Traffic:
    """The bytes of tensors that this process has sent and received peer to peer."""
    counts = [ctypes.c_int64() for _ in Traffic._fields]
    functions().tfdist_traffic(*map(ctypes.byref, counts))
    return Traffic(*(count.value for count in counts))
