"""Steps that XLA compiles equal steps that it does not: each layout, and each modifier on two of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.parity.compiled.layouts import Case, compare, rounding

ENGINES = itertools.cycle(["horovod", "tensorflow"])
MODIFIERS = [
    "accumulation",
    "loss scale",
    "odd batches",
    "ranks without rows",
    "steps per execution",
    "custom train_step",
]
TENSOR = (("tensor", 2),)
LAYOUTS: dict[str, dict] = {
    "data": {},
    "tensor": {"axes": TENSOR},
    "sequence parallel": {"axes": TENSOR},
    "ZeRO-1": {"options": (("zero_stage", 1),)},
    "ZeRO-2": {"options": (("zero_stage", 2),)},
    "ZeRO-3": {"options": (("zero_stage", 3),)},
    "pipeline 1f1b": {"axes": (("pipeline", 2),)},
    "pipeline interleaved": {"axes": (("pipeline", 2),)},
    "ring context": {"axes": (("context", 2),)},
    "gathered context": {"axes": (("context", 2),)},
    "experts": {"axes": (("expert", 2),)},
    "sparse embeddings": {},
    "LoRA": {},
}
QUICK = {("data", ""), ("tensor", ""), ("data x tensor", "odd batches")}


def cases() -> list[Case]:
    found = [
        Case(name, next(ENGINES), optimizer=optimizer, **options)
        for (name, options), optimizer in zip(
            LAYOUTS.items(), itertools.cycle(["sgd", "adamw"]), strict=False
        )
    ]
    found.append(Case("data", "horovod", 3, optimizer="adamw"))
    for modifier in MODIFIERS:
        found.append(Case("data", next(ENGINES), modifier=modifier))
        found.append(Case("data x tensor", next(ENGINES), 4, TENSOR, modifier=modifier))
    return found


CASES = cases()


def marked(case: Case):
    marks = [] if (case.layout, case.modifier) in QUICK and case.ranks != 3 else [pytest.mark.slow]
    return pytest.param((case.engine, case.ranks), case, marks=marks, id=str(case))


@pytest.mark.parametrize(("pool", "case"), [marked(case) for case in CASES], indirect=["pool"])
def test_as_uncompiled(pool, case):
    results = pool.run(compare, case, timeout=300)
    losses, weights = (
        max(each) for each in zip(*(found["differences"] for found in results), strict=True)
    )
    if case.modifier == "loss scale":
        assert losses <= 1e-3
    else:
        first = 1e-5 if case.optimizer == "sgd" else 1e-4
        if max(losses, weights) > first:
            changed = pool.run(rounding, case, timeout=300)
            first = max(first, 10 * max(number for each in changed for number in each))
        assert max(losses, weights) <= first
    chief = results[0]
    assert not chief["uncompiled"] and chief["parts"], "the steps were not compiled"
    for operations, _, _, others in chief["parts"]:
        assert operations > others, "most of the step was not compiled"


def test_each_case_is_in_the_document():
    """`python -m tests.parity.compiled.table` writes it."""
    page = (Path(__file__).parents[3] / "docs" / "compiled_steps.txt").read_text()
    lines = [line.split() for line in page.splitlines()]
    for case in CASES:
        words = [*case.layout.split(), *case.modifier.split(), case.optimizer, case.engine]
        assert [*words, str(case.ranks)] in [line[: len(words) + 1] for line in lines], str(case)
