"""The figures of a block of steps that ranks exchange: numbers in one order, for one collective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tfdist.addons.monitoring.monitor.sections import SECTIONS, Step

MOST_TIMERS = 8
#: The number of steps of a block for which ranks compare when their gradients were ready.
MOST_STEPS = 48

_TIMERS = [f"timer/{number}" for number in range(MOST_TIMERS)]
_FIELDS = (
    *("unknown_names", "steps", "seconds", "squares", "shortest", "longest"),
    *("hidden", "communicating", "sent", "rows", "tokens", "model_flops", "again_flops"),
    *("memory", "peak_memory", "parameters", "norm", "loss", "losses", "loss_scale", "cost"),
    "work",
    *(f"total/{name}" for name in (*SECTIONS, *_TIMERS)),
    *(f"median/{name}" for name in (*SECTIONS, *_TIMERS)),
)
_PLACES = {name: place for place, name in enumerate(_FIELDS)}
#: Sections in which a rank waits for others, or performs work that others do not.
_NO_WORK = ("communication", "monitor", "checkpoint")


class Block:
    """The figures of one rank.

    Args:
        vector: The numbers, if they come from another rank; else they are zeros.
    """

    def __init__(self, vector: np.ndarray | None = None):
        size = len(_FIELDS) + MOST_STEPS
        self.vector = np.zeros(size) if vector is None else np.asarray(vector)

    def __getitem__(self, name: str) -> float:
        return float(self.vector[_PLACES[name]])

    def __setitem__(self, name: str, value: float) -> None:
        self.vector[_PLACES[name]] = value

    @property
    def gradients(self) -> np.ndarray:
        """When the gradients of each step were ready, by the chief's clock; 0 where not recorded."""
        return self.vector[len(_FIELDS) :]

    def take(self, steps: Sequence[Step], timers: Mapping[str, int], offset: float) -> None:
        """Adds the times of steps.

        Args:
            steps: The steps, without those in which graphs were traced.
            timers: The places of sections that timers measure.
            offset: The seconds to add to this rank's time to get the chief's.
        """
        lengths = [step.end - step.begin for step in steps]
        if not lengths:
            return
        self["steps"], self["seconds"] = len(steps), sum(lengths)
        self["squares"] = sum(length * length for length in lengths)
        self["shortest"], self["longest"] = min(lengths), max(lengths)
        for name in ("hidden", "communicating", "sent", "rows", "tokens"):
            self[name] = sum(getattr(step, name) for step in steps)
        by_field: dict[str, np.ndarray] = {}
        for section in {name for step in steps for name in step.seconds}:
            # Timers beyond the number of fields count as callbacks, as their time would without them.
            known = section if section in SECTIONS else "callbacks"
            name = f"timer/{timers[section]}" if section in timers else known
            each = np.array([step.seconds.get(section, 0.0) for step in steps])
            by_field[name] = by_field.get(name, 0.0) + each
        for name, each in by_field.items():
            self[f"total/{name}"], self[f"median/{name}"] = each.sum(), float(np.median(each))
        waits = [sum(step.seconds.get(name, 0.0) for name in _NO_WORK) for step in steps]
        work = [length - wait for length, wait in zip(lengths, waits, strict=True)]
        self["work"] = float(np.median(work))
        for place, step in enumerate(steps[-MOST_STEPS:]):
            if not math.isnan(step.gradients):
                self.gradients[place] = step.gradients + offset
