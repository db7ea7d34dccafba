"""A check before the first step that all ranks call `fit`, `evaluate` or `predict` with the same arguments.

Ranks with data of different lengths would run different numbers of steps, and wait for each other forever.
Lengths, dtypes and shapes are compared in one small message, but not values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.collectives.objects import all_gather_object
from tfdist.data.sharding import is_per_rank
from tfdist.runtime.plugins import load_plugins
from tfdist.utils.places import places_by
from tfdist.watchdog.hints import ARGUMENTS
from tfdist.watchdog.report import format_ranks

#: Arguments with data, and arguments that determine the number of steps.
_DATA = ("x", "y", "sample_weight", "validation_data")
_NUMBERS = (
    "batch_size",
    "epochs",
    "initial_epoch",
    "steps",
    "steps_per_epoch",
    "validation_batch_size",
    "validation_freq",
    "validation_split",
    "validation_steps",
)
#: The environment variable that disables the warning of different batches.
COMPARE = "TFDIST_COMPARE_BATCHES"
_MOST_SHOWN = 4
_MOST_PARTS = 64


def check_agreement(
    strategy, kind: str, arguments: Mapping[str, Any], hooks: Sequence = ()
) -> None:
    """Compares the arguments of all ranks; all of them must call this.

    Args:
        strategy: The strategy.
        kind: "fit", "evaluate" or "predict".
        arguments: The arguments, by name.
        hooks: The hooks of the call.

    Raises:
        ValueError: Arguments differ; raised on all ranks.
    """
    own = _facts(arguments)
    if plugins := load_plugins():
        own["plugins"] = ", ".join(plugins)
    if hooks:
        own["hooks"] = ", ".join(type(hook).__name__ for hook in hooks)
    engine = strategy.engine
    every = all_gather_object((kind, own, engine.run), strategy.group(), name=ARGUMENTS)
    # A rank that failed in an earlier call may have counted fewer.
    engine.begin_run(1 + max(run for _, _, run in every))
    kinds = [other for other, _, _ in every]
    if len(set(kinds)) > 1:
        raise ValueError(
            "All ranks must call the same method: `fit`, `evaluate` or `predict`. Received: "
            f"{_by_rank(kinds)}."
        )
    facts = [other for _, other, _ in every]
    for name in dict.fromkeys(name for other in facts for name in other):
        values = [other.get(name, "nothing") for other in facts]
        if len(set(values)) > 1:
            raise ValueError(
                f"All ranks must call `{kind}` with the same data and the same number of steps. "
                f"Received: `{name}` is {_by_rank(values)}. Pass the whole data on every rank, from which "
                "the strategy selects the rows of each rank, or create a dataset for each rank with "
                "`strategy.distribute_datasets_from_function`."
            )
    if strategy.is_chief:
        _notice_large_batch(kind, arguments)


def compare_first_batches(strategy, digest: int) -> None:
    """Logs a warning if the first global batches of the ranks differ; all of them must call this.

    Args:
        strategy: The strategy.
        digest: The digest of this rank's global batch.
    """
    every = all_gather_object(digest, strategy.group(), name="first-batch")
    if len(set(every)) == 1 or not strategy.is_chief or os.environ.get(COMPARE) == "0":
        return
    others = [rank for rank, other in enumerate(every) if other != every[0]]
    logging.warning(
        "tfdist: all ranks must iterate over the same batches, of which each uses its own rows. Received: "
        "in `fit`, a different first batch on %s than on rank 0, so rows are lost or used twice. If the "
        "data are sharded by rank, for example by `ds.shard(size, rank)`, remove that, or pass them by "
        "`strategy.distribute_datasets_from_function`. If the pipeline draws random values, for example "
        "from a NumPy generator, use the same seed on all ranks. %s=0 disables this warning.",
        format_ranks(others),
        COMPARE,
    )


def describe(value: Any) -> str:
    """The structure, dtypes and shapes of data that must be the same on all ranks."""
    if isinstance(value, tf.data.Dataset):
        if is_per_rank(value):
            return "the rank's own dataset"
        batches = int(value.cardinality())
        kinds = {
            tf.data.INFINITE_CARDINALITY: "an infinite dataset",
            tf.data.UNKNOWN_CARDINALITY: "a dataset",
        }
        found = kinds.get(batches, f"a dataset of {batches} batches")
        return f"{found}{_specs(value.element_spec)}"
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=str)
        return f"{{{', '.join(f'{key}: {describe(each)}' for key, each in items)}}}"
    if isinstance(value, tuple | list) and not _is_of_numbers(value):
        if len(value) > _MOST_PARTS:
            return f"a {type(value).__name__} of {len(value)}"
        return f"({', '.join(describe(each) for each in value)})"
    if isinstance(value, str | bytes | bool | int | float | np.generic):
        return repr(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None and isinstance(value, tuple | list):
        shape, dtype = np.shape(value), np.asarray(value).dtype
    if shape is not None:
        name = getattr(dtype, "name", str(dtype)) if dtype is not None else type(value).__name__
        return f"{name} of shape {tuple(shape)}"
    length = getattr(value, "num_batches", None)
    return f"a {type(value).__name__}" + (f" of {length} batches" if length is not None else "")


def _facts(arguments: Mapping[str, Any]) -> dict[str, str]:
    given = {name: value for name, value in arguments.items() if value is not None}
    has_steps = given.get("steps_per_epoch") or given.get("steps")
    found = {
        name: describe(given[name])
        for name in _DATA
        # With a number of steps the length of a dataset does not matter.
        if name in given and not (has_steps and isinstance(given[name], tf.data.Dataset))
    }
    return found | {name: repr(given[name]) for name in _NUMBERS if name in given}


def _specs(spec) -> str:
    """The elements of a dataset, without the number of rows, which depends on drop_remainder."""
    shown = [
        f"{part.dtype.name}{list(part.shape[1:]) if part.shape.rank else ''}"
        for part in tf.nest.flatten(spec)
        if isinstance(part, tf.TensorSpec)
    ]
    return f" of {', '.join(shown)}" if shown else ""


def _is_of_numbers(value: Sequence) -> bool:
    return all(isinstance(each, bool | int | float | np.generic) for each in value)


def _by_rank(values: Sequence[str]) -> str:
    """The values with their ranks, for messages."""
    ranks, shown = places_by(values), []
    for value, some in list(ranks.items())[:_MOST_SHOWN]:
        more = ", ..." if len(some) > 8 else ""
        shown.append(f"{value} on {format_ranks(some[:8])}{more}")
    left = len(ranks) - len(shown)
    return "; ".join(shown) + (f"; and {left} others" if left else "")


def _notice_large_batch(kind: str, arguments: Mapping[str, Any]) -> None:
    batch_size, x = arguments.get("batch_size"), arguments.get("x")
    parts = [] if isinstance(x, tf.data.Dataset) else tf.nest.flatten(x)
    shape = getattr(parts[0], "shape", None) if parts else None
    rows = shape[0] if shape is not None and len(shape) else None
    if kind == "fit" and isinstance(batch_size, int) and rows is not None and batch_size > rows:
        logging.warning(
            "tfdist: batch_size=%d is larger than the data, %d rows: an epoch is one step.",
            batch_size,
            rows,
        )
