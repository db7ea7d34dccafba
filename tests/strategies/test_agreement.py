"""Ranks that call `fit` with other data than the rest are told so before a step, and not left to wait."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import on_ranks, skip_without, slow_but
from tfdist.watchdog.hints import likely_cause

#: By name: what the last rank does otherwise, and what all ranks are told.
DIFFERENCES = {
    "length": (lambda a: {"x": a["x"][:10], "y": a["y"][:10]}, "`x` is", "(40, 3)", "(10, 3)"),
    "labels": (lambda a: {"y": a["y"][:39]}, "`y` is", "(40, 1)", "(39, 1)"),
    "inner shape": (lambda a: {"x": a["x"][:, :2]}, "`x` is", "(40, 3)", "(40, 2)"),
    "dtype": (lambda a: {"x": a["x"].astype("float64")}, "`x` is", "float32", "float64"),
    "structure": (lambda a: {"x": (a["x"],)}, "`x` is", "float32", "(float32"),
    "weights": (lambda a: {"sample_weight": np.ones(40)}, "`sample_weight` is", "nothing", "(40,)"),
    "batch size": (lambda a: {"batch_size": 10}, "`batch_size` is", "20 on", "10 on"),
    "epochs": (lambda a: {"epochs": 3}, "`epochs` is", "1 on", "3 on"),
    "first epoch": (lambda a: {"initial_epoch": 1}, "`initial_epoch` is", "0 on", "1 on"),
    "validation": (
        lambda a: {"validation_data": (a["x"], a["y"])},
        "`validation_data` is",
        "nothing",
        "(40, 1)",
    ),
    "data set": (lambda a: {"x": _dataset(a, 3)}, "`x` is", "2 batches", "3 batches"),
    "no length": (
        lambda a: {"x": _dataset(a, 2).repeat()},
        "`x` is",
        "2 batches",
        "an infinite dataset",
    ),
}


def _dataset(arguments, batches: int):
    import tensorflow as tf

    rows = np.zeros([20 * batches, 3], np.float32)
    return tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(20)


def what_is_said(name: str) -> str:
    """What `fit` raises on this rank."""
    import keras

    from tfdist.testing import strategy

    on = strategy()
    x, y = np.ones([40, 3], np.float32), np.ones([40, 1], np.float32)
    arguments = {"x": x, "y": y, "batch_size": 20, "epochs": 1, "initial_epoch": 0}
    if name in ("data set", "no length"):
        arguments = {"x": _dataset(arguments, 2), "epochs": 1}
    if on.mesh.rank == on.mesh.size - 1:
        arguments = {**arguments, **DIFFERENCES[name][0]({**arguments, "y": y})}
    with on.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    try:
        model.fit(**arguments, verbose=0)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", DIFFERENCES)
@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
def test_all_ranks_hear_which_rank_has_what(pool, name):
    said = pool.run(what_is_said, name, timeout=60.0)
    _, *words = DIFFERENCES[name]
    for text in said:
        for word in (*words, f"on rank {pool.num_ranks - 1}"):
            assert word in text, text
        assert "\n" not in text


def other_calls() -> list[str]:
    """What `evaluate` and `predict` raise where a rank calls the other, or has other rows."""
    import keras

    from tfdist.testing import strategy

    on = strategy()
    x = np.ones([8 if on.is_chief else 6, 3], np.float32)
    with on.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    said = []
    for call in (
        lambda: model.predict(x, verbose=0),
        lambda: model.evaluate(x, x[:, :1], verbose=0),
        lambda: (model.predict if on.is_chief else model.evaluate)(np.ones([4, 3]), verbose=0),
    ):
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    model.evaluate(np.ones([4, 3]), np.ones([4, 1]), verbose=0)  # All is well again.
    return said


@on_ranks(("horovod", 2), ("tensorflow", 2))
def test_evaluate_and_predict_are_compared_too(pool):
    for predicted, evaluated, other in pool.run(other_calls, timeout=60.0):
        assert "call `predict`" in predicted
        assert "(8, 3) on rank 0" in predicted
        assert "(6, 3) on rank 1" in predicted
        assert "call `evaluate`" in evaluated
        assert "predict on rank 0; evaluate on rank 1" in other


def test_ranks_with_the_same_value_are_named_together():
    from tfdist.strategies.keras_patches.agreement import _by_rank

    assert _by_rank(["a"] * 9 + ["b"]) == "a on ranks 0, 1, 2, 3, 4, 5, 6, 7, ...; b on rank 9"
    assert _by_rank(list("abcdef")).endswith("d on rank 3; and 2 others")


def test_a_cause_is_named_where_a_fit_lacks_ranks():
    cause = likely_cause("all_gather/world/fit/arguments/size", [0], [1, 2])
    assert cause.startswith("Rank 0 called `fit` (or `evaluate`, `predict`), ranks 1, 2 did not: ")
    assert "strategy.is_chief" in cause
    assert likely_cause("all_reduce/data/bucket", [0], [1]) == ""
    assert likely_cause("all_gather/world/fit/arguments/size", [0, 1], []) == ""
    for collective in ("all_gather/data/saved", "all_reduce/world/save_weights"):
        cause = likely_cause(collective, [0], [1])
        assert cause.startswith(
            "Rank 0 called `save` (or `save_weights`, `export`), rank 1 did not: "
        )


PROGRAM = """
import keras, numpy as np, tfdist
strategy = tfdist.strategies.auto(watchdog_seconds=20, zero_stage={stage})
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
if strategy.is_chief:
    {call}
"""


def _run(tmp_path: Path, text: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(text))
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    return subprocess.run(
        [*launcher, sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )


@pytest.mark.parametrize("engine", slow_but(["tensorflow"], ["horovod", "tensorflow"]))
def test_fit_behind_is_chief_is_named_as_the_cause(tmp_path, engine):
    skip_without(engine)
    call = "model.fit(np.ones([8, 3]), np.ones([8, 1]), verbose=0)"
    verdict = _verdict(tmp_path, engine, call)
    assert "Rank 0 called `fit` (or `evaluate`, `predict`), rank 1 did not: all" in verdict


@pytest.mark.parametrize("engine", slow_but(["tensorflow"], ["horovod", "tensorflow"]))
@pytest.mark.parametrize(
    ("method", "stage"),
    [
        pytest.param("save('m.keras')", 0, marks=pytest.mark.slow),
        ("save_weights('m.weights.h5')", 3),
    ],
)
def test_a_save_behind_is_chief_is_named_as_the_cause(tmp_path, method, stage, engine):
    skip_without(engine)
    verdict = _verdict(tmp_path, engine, f"model.{method}", stage)
    assert "Rank 0 called `save` (or `save_weights`, `export`), rank 1 did not: all" in verdict


def _verdict(tmp_path: Path, engine: str, call: str, stage: int = 0) -> str:
    """What the watchdog says of a call that the chief alone makes."""
    launcher = str(Path(sys.executable).parent / "tfdist-run")
    program = PROGRAM.format(call=call, stage=stage)
    done = _run(tmp_path, program, launcher, "-np", "2", f"--engine={engine}", "--")
    assert done.returncode == 75, done.stdout + done.stderr
    (verdict,) = [line for line in done.stdout.splitlines() if "watchdog on rank 0" in line]
    return verdict


@pytest.mark.parametrize(
    "kind", slow_but(["HorovodStrategy"], ["HorovodStrategy", "MultiWorkerStrategy"])
)
def test_a_forgotten_launcher_is_told(tmp_path, kind):
    if kind == "HorovodStrategy":
        skip_without("horovod")
    done = _run(tmp_path, f"import tfdist\ntfdist.strategies.{kind}()\n")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "tfdist: 1 rank" in line]
    assert len(told) == 1, done.stderr
    assert "`tfdist-run -np 4 -- python train.py` starts 4." in told[0]


@pytest.mark.parametrize("kind", slow_but(["auto"], ["LocalStrategy", "auto"]))
def test_a_process_that_is_meant_to_be_alone_is_told_nothing(tmp_path, kind):
    done = _run(tmp_path, f"import tfdist\ntfdist.strategies.{kind}()\n")
    assert done.returncode == 0, done.stderr
    assert "1 rank" not in done.stderr


@pytest.mark.parametrize(("batch_size", "told"), [(32, True), (8, False), (None, False)])
def test_a_batch_that_is_larger_than_the_data_is_told(monkeypatch, batch_size, told):
    from tfdist.strategies.keras_patches import agreement

    said = []
    monkeypatch.setattr(agreement.logging, "warning", lambda *words: said.append(words))
    agreement._notice_large_batch("fit", {"x": np.ones([8, 3]), "batch_size": batch_size})
    assert bool(said) == told
    if told:
        assert said[0][0] % said[0][1:] == (
            "tfdist: batch_size=32 is larger than the data, 8 rows: an epoch is one step."
        )
