"""Writes docs/compiled_steps.txt: `python -m tests.parity.compiled.table`, on two cores in about 15 minutes."""

from __future__ import annotations

import itertools
from pathlib import Path

from tabulate import tabulate

from tests.parity.compiled.layouts import Case, compare
from tests.parity.compiled.test_parity import CASES
from tfdist.testing import RankPool

PAGE = Path(__file__).parents[3] / "docs" / "compiled_steps.txt"
HEAD = ("layout", "with", "optimizer", "engine", "ranks", "loss", "weights", "parts", "different")


def row(case: Case, found: list[dict]) -> tuple:
    """The largest differences of all ranks, and the parts of the first."""
    losses, weights = (
        max(each) for each in zip(*(rank["differences"] for rank in found), strict=True)
    )
    _, parts, distinct, _ = found[0]["parts"][0]
    words = (case.layout, case.modifier, case.optimizer, case.engine, case.ranks)
    return *words, f"{losses:.0e}", f"{weights:.0e}", parts, distinct


def page(rows: dict[Case, tuple]) -> str:
    """The document."""
    table = tabulate([rows[case] for case in CASES], HEAD, tablefmt="simple", disable_numparse=True)
    text = f"""Steps that XLA compiles, compared with steps that it does not compile, on the same ranks.

The largest differences of a loss and of a weight after 20 steps and an evaluation, in float32 (with a loss
scale in float16), without dropout; the parts of a step that are compiled, and how many of them are different.

{table}
"""
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def main() -> None:
    rows = {}
    cases = sorted(CASES, key=lambda case: (case.engine, case.ranks))
    for (engine, ranks), group in itertools.groupby(cases, lambda case: (case.engine, case.ranks)):
        with RankPool(ranks, engine) as pool:
            for case in group:
                rows[case] = row(case, pool.run(compare, case, timeout=300))
                print(*rows[case], flush=True)
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
