"""The layouts that the benchmark of the planner measures."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdist.addons.planner import Layout, Transformer

MODELS = {
    "small": Transformer(4, 192, 4, 512, 128),
    "large": Transformer(6, 384, 6, 512, 128),
    "experts": Transformer(4, 192, 4, 512, 128, experts=4),
    "wide": Transformer(2, 512, 8, 512, 128),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout to measure.

    Attributes:
        name: A name of `MODELS`.
        layout: The layout.
        batch: Samples of an update.
        hosts: Over how many hosts its ranks go, evenly.
    """

    name: str
    layout: Layout
    batch: int
    hosts: int = 1

    def __str__(self) -> str:
        return f"{self.layout.ranks} ranks, {self.name}, {self.layout.words()}"

    @property
    def sizes(self) -> Transformer:
        """The model."""
        return MODELS[self.name]

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads: the layout by what is not as always."""
        plain = dataclasses.asdict(Layout())
        changed = {
            name: each
            for name, each in dataclasses.asdict(self.layout).items()
            if each != plain[name]
        }
        return {"name": self.name, "layout": changed, "batch": self.batch, "hosts": self.hosts}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Case:
        """The case that `as_json` wrote."""
        return cls(**{**found, "layout": Layout(**found["layout"])})


def cases(ranks: int) -> list[Case]:
    """The layouts that are measured on so many ranks of this machine."""
    n = ranks
    if n == 8:
        # Fewer rows a rank: this takes long enough.
        return [
            Case(name, layout, 32)
            for name, layout in (
                ("small", Layout(data=8)),
                ("small", Layout(data=8, zero_stage=1)),
                ("small", Layout(data=4, tensor=2)),
                ("small", Layout(data=4, context=2)),
                ("small", Layout(data=2, pipeline=4, num_microbatches=4)),
                ("large", Layout(data=8)),
                ("large", Layout(data=8, zero_stage=3)),
                ("large", Layout(data=4, pipeline=2, num_microbatches=4)),
                ("large", Layout(data=2, pipeline=2, tensor=2, num_microbatches=4)),
                ("experts", Layout(data=2, expert=4)),
            )
        ]
    found = [
        ("small", Layout(data=n)),
        ("small", Layout(data=n, zero_stage=1)),
        ("small", Layout(data=n, zero_stage=3)),
        ("small", Layout(data=n, accumulation=2)),
        ("small", Layout(context=n)),
        ("small", Layout(pipeline=n, num_microbatches=2 * n)),
        ("small", Layout(pipeline=n, num_microbatches=4 * n, schedule="zero-bubble")),
        ("large", Layout(data=n)),
        ("large", Layout(data=n, zero_stage=2)),
        ("large", Layout(data=n, recompute="every_layer")),
        ("large", Layout(data=n // 2, tensor=2)),
        ("large", Layout(data=n // 2, tensor=2, recompute="selective")),
        ("large", Layout(data=n // 2, pipeline=2, num_microbatches=4)),
        ("large", Layout(data=n // 2, pipeline=2, num_microbatches=8)),
        ("experts", Layout(expert=n)),
    ]
    if n > 2:
        found += [
            ("large", Layout(tensor=2, pipeline=2, data=n // 4, num_microbatches=4)),
            ("small", Layout(context=2, data=n // 2)),
            ("experts", Layout(expert=2, data=n // 2)),
        ]
    return [Case(name, layout, 8 * ranks) for name, layout in found]


#: What says how much of the gradients a link between hosts hides.
LINK_CASE = Case("wide", Layout(data=2), 8, hosts=2)


def limit_cases() -> list[Case]:
    """The layouts that are trained under a limit of memory; other batches than of `cases`."""
    return [
        Case(name, layout, batch)
        for name, layout, batch in (
            ("large", Layout(data=2), 32),
            ("large", Layout(data=2, zero_stage=1), 48),
            ("large", Layout(data=2, zero_stage=3), 32),
            ("large", Layout(data=2, recompute="every_layer"), 64),
            ("large", Layout(data=2, accumulation=2), 64),
            ("large", Layout(tensor=2), 32),
            ("large", Layout(pipeline=2, num_microbatches=4), 64),
            ("large", Layout(pipeline=2, num_microbatches=8, schedule="zero-bubble"), 64),
            ("large", Layout(context=2), 32),
            ("experts", Layout(expert=2), 64),
        )
    ]


def host_cases() -> list[Case]:
    """The layouts that are measured on two hosts of a rank each."""
    return [
        Case(name, layout, 16, hosts=2)
        for name, layout in (
            ("small", Layout(data=2)),
            ("large", Layout(data=2)),
            ("large", Layout(data=2, zero_stage=1)),
            ("large", Layout(tensor=2)),
            ("large", Layout(pipeline=2, num_microbatches=4)),
        )
    ]
