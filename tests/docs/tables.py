"""Tables of the documents that the code computes: `python -m tests.docs.tables` writes them anew."""

from __future__ import annotations

import re
from pathlib import Path

from tfdist.addons.planner import Layout, machine
from tfdist.addons.planner.memory import part_bytes, rank_memory
from tfdist.addons.planner.parts import Part
from tfdist.pipeline.schedules import make_schedule
from tfdist.pipeline.simulation import simulate

__all__ = ["TABLES", "in_document", "written"]

DOCS = Path(__file__).parents[2] / "docs"
#: So many layers that the two which ZeRO-3 has whole are nothing.
LAYERS = 10_000


def states(parameters: float, ranks: int, zero_stage: int) -> float:
    """Bytes of parameters, gradients and Adam's state on a rank, in float32, with accumulation."""
    layout = Layout(data=ranks, zero_stage=zero_stage, accumulation=2)
    part = Part("layer", LAYERS, whole_parameters=parameters / LAYERS)
    found = rank_memory([(LAYERS,)], 0, [part_bytes(part, layout, 1)], layout, machine("a100"))
    return found.parameters + found.gradients + found.optimizer


def gigabytes(size: float) -> str:
    """In decimal GB, with a place behind the point below 30."""
    size = size / 1e9 + 1e-6  # A half is rounded up.
    return f"{size:.1f} GB" if size < 30 else f"{size:,.0f} GB"


def zero() -> str:
    """What fits: the table of docs/choose.md."""
    lines = [
        "| n | Data | `zero_stage=1` | `zero_stage=2` | `zero_stage=3` |",
        "|---|---|---|---|---|",
    ]
    for words, parameters in (
        ("125 million", 125e6), ("1.3 billion", 1.3e9), ("7 billion", 7e9), ("70 billion", 70e9)
    ):  # fmt: skip
        cells = [words, *(gigabytes(states(parameters, 8, stage)) for stage in range(4))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def bubble() -> str:
    """How long ranks are idle: the table of docs/pipeline.md."""
    kinds = [
        (name, stages) for stages in (2, 4, 8) for name in ("1f1b", "interleaved", "zero-bubble")
    ]
    lines = [
        f"| M | {' | '.join(f'`{name}`, P = {stages}' for name, stages in kinds)} |",
        f"|---|{'---|' * len(kinds)}",
    ]
    for microbatches in (2, 4, 8, 16, 32):
        shares = [
            f"{simulate(make_schedule(name, stages, microbatches)).idle_share:.1%}"
            if microbatches >= stages
            else ""
            for name, stages in kinds
        ]
        lines.append(f"| {microbatches} | {' | '.join(shares)} |")
    return "\n".join(lines)


#: By document and name, what makes the table that stands between the marks of that name.
TABLES = {
    ("choose.md", "planner: zero"): zero,
    ("pipeline.md", "schedules: bubble"): bubble,
}


def _marked(name: str) -> re.Pattern:
    return re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(\n<!-- end -->)", re.DOTALL)


def in_document(document: str, name: str) -> str:
    """The table as the document has it."""
    text = (DOCS / document).read_text(encoding="utf-8")
    found = _marked(name).search(text)
    if found is None:
        raise ValueError(f"docs/{document} has no marks <!-- {name} --> and <!-- end -->.")
    return found[0].split("\n", 1)[1].rsplit("\n", 1)[0]


def written(document: str, name: str) -> str:
    """The document with the table as it is computed."""
    text = (DOCS / document).read_text(encoding="utf-8")
    table = TABLES[document, name]()
    return _marked(name).sub(lambda found: f"{found[1]}{table}{found[2]}", text)


if __name__ == "__main__":
    for each in TABLES:
        (DOCS / each[0]).write_text(written(*each), encoding="utf-8")
