"""No damage restores a wrong number, hangs, aborts, or raises anything but a `CheckpointError`."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint import fuzz
from tests.checkpoint.damages_of_descriptions import DAMAGES
from tests.conftest import full_cross, on_ranks

ROOT = Path(__file__).parents[2]


def check(*flags: str, timeout: float) -> None:
    """In a process of its own: a damage may end it."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.fuzz", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-3000:]
    assert " 0 wrong" in found.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", [1, 2])
def test_each_kind_of_damage(version):
    cases = len(DAMAGES) + 40 if version == 2 else 40
    check(f"--cases={cases}", "--every", f"--format={version}", timeout=580)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize("cases", [500, pytest.param(2000, marks=full_cross)])
def test_many_cases(version, cases):
    check(f"--cases={cases}", f"--format={version}", timeout=2900)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cases", [60, pytest.param(500, marks=full_cross)])
def test_many_cases_in_s3(cases):
    check(f"--cases={cases}", "--s3", timeout=3500)


def on_ranks_with(folder: str, work: str, seed: str):
    """What a rank of two finds: which checkpoint it has, or the error."""
    from tests.models.gpt_programs import scope
    from tfdist import checkpoint
    from tfdist.testing import rank

    if "fuzzed" not in rank._state:
        with scope({"zero_stage": 3}):
            rank._state["fuzzed"] = fuzz.build()
    model = rank._state["fuzzed"]
    if not work:
        for step in (10, 20):
            fill(model, step)
            checkpoint.save(folder, model, step=step)
        return None
    fill(model, 1)
    try:
        return "restored", checkpoint.restore(work, model).step, held(model)
    except checkpoint.CheckpointError as error:
        return "error", str(error), held(model)


def fill(model, value: float) -> None:
    import tensorflow as tf

    for variable in fuzz.variables_of(model):
        variable._value.assign(tf.cast(tf.fill(variable._value.shape, value), variable.dtype))


def held(model) -> set[float]:
    """The numbers in what a rank has, but for what fills up its shards."""
    found = [variable._value.numpy() for variable in fuzz.variables_of(model)]
    return {float(number) for value in found for number in value.ravel()} - {0.0}


@pytest.mark.timeout(600)
@on_ranks(("tensorflow", 2))
def test_on_two_ranks(pool, tmp_path):
    """Both ranks take the same checkpoint, or both none, though one alone reads what is damaged."""
    base, work = tmp_path / "base", tmp_path / "work"
    pool.run(on_ranks_with, str(base), "", "", timeout=300)
    seed = str(random.SystemRandom().randrange(1 << 32))
    chance = random.Random(seed)
    names = ["chunks_swapped", "chunk_of_another_step", "file_lost", "file_is_a_pipe", "truncated"]
    for name in [*names, "both_are_damaged", "newest_lost", "manifest_of_nonsense"]:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base, work)
        old, new = sorted(work.glob("step-*"))
        DAMAGES[name](chance, new, old)
        found = pool.run(on_ranks_with, "", str(work), seed, timeout=120)
        kinds = {(kind, said) for kind, said, _ in found}
        assert len(kinds) == 1, (seed, name, kinds)
        kind, said = kinds.pop()
        if kind == "restored":
            assert said in (10, 20)
            assert all(values == {float(said)} for _, _, values in found), (seed, name, found)
        else:
            assert "\n" not in said
            assert all(values == {1.0} for _, _, values in found), (seed, name, found)
