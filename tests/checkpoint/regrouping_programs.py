"""What ranks would write of a model's arrays, in small chunks."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np

from tests.checkpoint.programs import losses_of, model_on


def written(mesh: dict, chunk_bytes: int, experts: bool, positions: str) -> dict:
    """By array: its whole value, this rank's boxes and their values, and the chunks that these touch.

    Also the names and shapes of arrays with a row for each rank, which no rank has whole.
    """
    from tfdist.backend.keras.attributes import stored_value
    from tfdist.checkpoint import chunks
    from tfdist.checkpoint.entries import entries_of
    from tfdist.checkpoint.regrouping import Regrouping
    from tfdist.sharding.layout import layout_of

    model, data = model_on(mesh, experts, positions=positions)
    losses_of(model, data)
    entries = entries_of(model)
    whole = {}
    for entry in entries:
        if entry.merge is None:
            value = stored_value(entry.variable)
            whole[entry.name] = np.asarray(layout_of(entry.variable).all_gather(value))
    found: dict = {}
    with mock.patch.object(chunks, "CHUNK_BYTES", chunk_bytes):
        for entry, held in Regrouping(entries).values():
            shape = chunks.chunk_shape_of(*entry.array)
            touched = set()
            for shard in entry.shards:
                box = [
                    slice(each, each + 1) if isinstance(each, int) else each for each in shard.box
                ]
                ranges = [
                    range(s.start // c, -(-s.stop // c)) for s, c in zip(box, shape, strict=True)
                ]
                touched |= set(itertools.product(*ranges))
            parts = [(shard.box, shard.get(held)) for shard in entry.shards]
            found[entry.name] = (entry.shape, parts, touched)
    rows = {(entry.name, entry.shape) for entry in entries if entry.merge is not None}
    return {"whole": whole, "written": found, "rows": rows}
