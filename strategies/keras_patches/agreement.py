"""Whether all ranks call `fit`, `evaluate` and `predict` with like arguments, told before a step.

Ranks whose data differ in length run different numbers of steps, and wait for each other for ever.
Lengths, dtypes and shapes are compared, not values: that is one small message.
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
from tfdist.watchdog.hints import ARGUMENTS
from tfdist.watchdog.report import rank_words

#: Arguments that are data, and those that say how many steps there are.
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
#: The environment variable that silences the warning of unlike batches.
COMPARE = "TFDIST_COMPARE_BATCHES"
_MOST_SHOWN = 4
_MOST_PARTS = 64


def check_agreement(
    strategy, kind: str, arguments: Mapping[str, Any], hooks: Sequence = ()
) -> None:
    """Compares the arguments of all ranks; each of them calls this.

    Args:
        strategy: The strategy.
        kind: "fit", "evaluate" or "predict".
        arguments: By name.
        hooks: The hooks around the call.

    Raises:
        ValueError: They differ; on all ranks.
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
            f"All ranks call the same of `fit`, `evaluate` and `predict`. Received: {_by_rank(kinds)}."
        )
    facts = [other for _, other, _ in every]
    names = dict.fromkeys(name for other in facts for name in other)
    for name in names:
        values = [other.get(name, "nothing") for other in facts]
        if len(set(values)) > 1:
            raise ValueError(
                f"All ranks call `{kind}` with the same data and the same numbers of steps. "
                f"Received: `{name}` is {_by_rank(values)}. Give every rank the whole data, of whose "
                "batches the strategy takes each rank's rows, or each its own by "
                "`strategy.distribute_datasets_from_function`."
            )
    if strategy.is_chief:
        _notice_large_batch(kind, arguments)


def compare_first_batches(strategy, digest: int) -> None:
    """Warns where the ranks' first global batches differ; each of them calls this.

    Args:
        strategy: The strategy.
        digest: That of this rank's batch, before its rows were taken.
    """
    every = all_gather_object(digest, strategy.group(), name="first-batch")
    if len(set(every)) == 1 or not strategy.is_chief or os.environ.get(COMPARE) == "0":
        return
    others = [rank for rank, other in enumerate(every) if other != every[0]]
    logging.warning(
        "tfdist: ranks iterate the same batches, of which each takes its own rows. Received: in `fit` "
        "another first batch on %s than on rank 0, so rows are lost or seen twice. Either the data are cut "
        "by rank before, as by `ds.shard(size, rank)`: leave that out, or give them by "
        "`strategy.distribute_datasets_from_function`; or the pipeline draws random values on each rank, "
        "as of a NumPy generator without a seed: seed it alike. %s=0 leaves this warning out.",
        rank_words(others),
        COMPARE,
    )


def describe(value: Any) -> str:
    """The structure, dtypes and shapes of data, as far as they have to be alike on all ranks."""
    if isinstance(value, tf.data.Dataset):
        if is_per_rank(value):
            return "a data set of the rank's own"
        batches = int(value.cardinality())
        begins = {
            tf.data.INFINITE_CARDINALITY: "an endless data set",
            tf.data.UNKNOWN_CARDINALITY: "a data set",
        }
        begin = begins.get(batches, f"a data set of {batches} batches")
        return f"{begin}{_specs(value.element_spec)}"
    if isinstance(value, Mapping):
        inner = ", ".join(
            f"{key}: {describe(each)}" for key, each in sorted(value.items(), key=str)
        )
        return f"{{{inner}}}"
    if isinstance(value, tuple | list) and not _is_of_numbers(value):
        if len(value) > _MOST_PARTS:
            return f"a {type(value).__name__} of {len(value)}"
        return f"({', '.join(describe(each) for each in value)})"
    if isinstance(value, str | bytes | bool | int | float | np.generic):
        return repr(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None and isinstance(value, tuple | list):
        value = np.asarray(value)
        shape, dtype = value.shape, value.dtype
    if shape is not None:
        name = getattr(dtype, "name", str(dtype)) if dtype is not None else type(value).__name__
        return f"{name} of shape {tuple(shape)}"
    length = getattr(value, "num_batches", None)
    return f"a {type(value).__name__}" + (f" of {length} batches" if length is not None else "")


def _facts(arguments: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    has_steps = arguments.get("steps_per_epoch") or arguments.get("steps")
    for name in _DATA:
        value = arguments.get(name)
        # With a number of steps nobody counts batches.
        if value is not None and not (has_steps and isinstance(value, tf.data.Dataset)):
            found[name] = describe(value)
    for name in _NUMBERS:
        value = arguments.get(name)
        if value is not None:
            found[name] = repr(value)
    return found


def _specs(spec) -> str:
    """An element of a data set without its number of rows, which drop_remainder decides."""
    shown = [
        f"{part.dtype.name}{list(part.shape[1:]) if part.shape.rank else ''}"
        for part in tf.nest.flatten(spec)
        if isinstance(part, tf.TensorSpec)
    ]
    return f" of {', '.join(shown)}" if shown else ""


def _is_of_numbers(value: Sequence) -> bool:
    return all(isinstance(each, bool | int | float | np.generic) for each in value)


def _by_rank(values: Sequence[str]) -> str:
    """Which rank has what: one entry for each value."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    shown = []
    for value, some in list(ranks.items())[:_MOST_SHOWN]:
        more = ", ..." if len(some) > 8 else ""
        shown.append(f"{value} on {rank_words(some[:8])}{more}")
    left = len(ranks) - len(shown)
    return "; ".join(shown) + (f"; and {left} others" if left else "")


def _notice_large_batch(kind: str, arguments: Mapping[str, Any]) -> None:
    batch_size, x = arguments.get("batch_size"), arguments.get("x")
    parts = [] if isinstance(x, tf.data.Dataset) else tf.nest.flatten(x)
    shape = getattr(parts[0], "shape", None) if parts else None
    rows = shape[0] if shape is not None and len(shape) else None
    if kind == "fit" and isinstance(batch_size, int) and rows is not None and batch_size > rows:
        logging.warning(
            "tfdist: batch_size=%d is more than the data has, %d rows: an epoch is one step.",
            batch_size,
            rows,
        )
