"""`parallelize`: stock models split by a plan compute what one process does, or are refused."""

from __future__ import annotations

import json
import zipfile

import keras
import numpy as np
import pytest

from tests.conftest import on_ranks
from tests.strategies.observing import without_tfdist
from tests.tensor_parallel import parallel_programs as programs
from tests.tensor_parallel import parallel_refusals as refusals
from tfdist.tensor_parallel import parallelize
from tfdist.tensor_parallel import plan as plans
from tfdist.tensor_parallel.report import VariableReport

TWO = {"data": 1, "tensor": 2}
HUB = ("gpt2", "gpt2_lm", "llama", "qwen3")
slow = pytest.mark.slow


def check_parity(pool, one_process, name, mesh=TWO, tolerance=1e-5, **options):
    if name in HUB:
        pytest.importorskip("keras_hub")
    single = {key: value for key, value in options.items() if key != "split_loss"}
    (right,) = one_process.run(programs.train, name, timeout=240, **single)
    for outcome in pool.run(programs.train, name, mesh, timeout=240, **options):
        assert outcome.losses == pytest.approx(right.losses, rel=tolerance)
        assert outcome.evaluation == pytest.approx(right.evaluation, rel=tolerance)
        np.testing.assert_allclose(outcome.predictions, right.predictions, atol=20 * tolerance)
        for found, expected in [(outcome.weights, right.weights), (outcome.slots, right.slots)]:
            assert list(found) == list(expected)
            for path, value in found.items():
                np.testing.assert_allclose(value, expected[path], atol=tolerance, err_msg=path)
    assert right.losses[-1] < right.losses[0]


@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    "name",
    [
        "transformer",
        *(pytest.param(name, marks=slow) for name in ("subclassed", "mlp", "grouped", *HUB)),
    ],
)
def test_training_is_that_of_one_process(pool, one_process, name):
    check_parity(pool, one_process, name)


@slow
@on_ranks(("horovod", 4), ("tensorflow", 4))
@pytest.mark.parametrize("name", ["transformer", "gpt2_lm"])
def test_on_data_and_tensor_ranks(pool, one_process, name):
    check_parity(pool, one_process, name, {"data": 2, "tensor": 2}, tolerance=1e-4)


@slow
@on_ranks(("tensorflow", 2))
@pytest.mark.parametrize("name", ["mlp", "subclassed", "transformer"])
def test_over_tensorflows_collectives(pool, one_process, name):
    check_parity(pool, one_process, name)


@slow
@on_ranks(("horovod", 2))
def test_the_data_axis_alone_changes_nothing(pool, one_process):
    check_parity(pool, one_process, "transformer", {"data": 2})


@slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("name", ["transformer", "gpt2_lm"])
def test_logits_stay_split_for_a_loss_that_takes_them(pool, name):
    if name in HUB:
        pytest.importorskip("keras_hub")
    seen = pool.run(programs.logits_seen, name, TWO, timeout=240)
    assert seen == [{7}, {7}]  # Of 13, padded to 14.


@slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("name", ["transformer", "gpt2_lm"])
def test_training_with_split_logits_is_that_of_one_process(pool, one_process, name):
    check_parity(pool, one_process, name, split_loss=True)


@slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("name", ["mlp", "transformer", "gpt2_lm"])
def test_a_saved_model_is_one_of_plain_keras(pool, tmp_path, name):
    if name in HUB:
        pytest.importorskip("keras_hub")
    path = str(tmp_path / "model.keras")
    saved = pool.run(programs.save, name, path, TWO, timeout=240)
    with zipfile.ZipFile(path) as archive:
        config = archive.read("config.json").decode()
    assert "tfdist" not in config
    if name not in HUB:
        modules = {layer["module"] for layer in json.loads(config)["config"]["layers"]}
        assert modules == {"keras.layers"}
    with without_tfdist() as process:
        loaded, slots = process.submit(programs.load, name, path).result(240)
    for predictions, own_slots in saved:
        np.testing.assert_allclose(predictions, loaded, atol=1e-5)
        if name in HUB:
            continue  # KerasHub compiles its tasks by a method that Keras does not repeat.
        assert list(own_slots) == list(slots)
        for path, value in own_slots.items():
            np.testing.assert_array_equal(value, slots[path], err_msg=path)


@on_ranks(("horovod", 2))
def test_what_stands_between_column_and_row(pool):
    """Dropout there differs by rank, and a whole weight there has its gradient summed."""
    first, second = pool.run(programs.between, TWO)
    for name in ("drop", "attention"):
        assert not np.array_equal(first["masks"][name], second["masks"][name]), name
    np.testing.assert_array_equal(first["masks"]["drop_whole"], second["masks"]["drop_whole"])
    assert first["partial"] == ["block_0/rate", "block_1/rate"]


@on_ranks(("horovod", 2))
def test_attention_takes_one_sum_in_each_direction(pool):
    for counts in pool.run(programs.sums_of_attention, TWO):
        assert counts == {"forward": 1, "both": 2}


@on_ranks(("horovod", 2))
def test_policies_masks_and_models_around(pool):
    """Mixed precision; a model built on a split one; values that differed between ranks."""
    for result in pool.run(programs.around, TWO, timeout=240):
        np.testing.assert_allclose(result["mixed"][0], result["mixed"][1], atol=0.05)
        assert result["symbolic"] == (None, 3)
        np.testing.assert_allclose(result["alike"][0], result["alike"][1], atol=1e-6)


@slow
@on_ranks(("horovod", 2))
def test_wrong_plans_are_refused_and_change_nothing(pool):
    for found in pool.run(refusals.on_a_rank, TWO, timeout=240):
        for name, (message, unchanged) in found.items():
            for part in refusals.ON_RANKS[name].says:
                assert part in message, f"{name}: {message}"
            assert unchanged, name


@pytest.mark.parametrize("name", refusals.ANYWHERE)
def test_wrong_plans_are_refused_on_one_device(name):
    case = refusals.ANYWHERE[name]
    with pytest.raises(ValueError) as caught:
        parallelize(case.build(), case.plan)
    for part in case.says:
        assert part in str(caught.value)


def test_without_a_strategy_nothing_changes():
    keras.utils.set_random_seed(1)
    model = programs.transformer()
    before = [value.copy() for value in model.get_weights()]
    assert parallelize(model, programs.TRANSFORMER) is model
    report = programs.report_on(model)
    for value, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, expected)
    assert report.tensor == 1
    assert [row.path for row in report.variables] == [weight.path for weight in model.weights]
    assert {row.local_shape == row.shape for row in report.variables} == {True}
    assert report.bytes_per_rank == sum(value.nbytes for value in before)
    parallelize(model, programs.TRANSFORMER)


@on_ranks(("horovod", 2))
def test_the_report_names_axes_and_bytes(pool):
    report = pool.run(programs.report_of, "mlp", TWO)[0]
    rows = {row.path: row for row in report.variables}
    assert rows["up/kernel"] == VariableReport(
        "up/kernel", "column", 1, (6, 16), (6, 8), 6 * 8 * 4, 0
    )
    assert rows["up/bias"].axis == 0  # It follows its kernel.
    assert rows["down/kernel"].axis == 0
    assert rows["head/kernel"].local_shape == (6, 3)  # Of 5, padded to 6.
    assert rows["down/bias"].replicated_bytes == rows["down/bias"].bytes_per_rank == 24
    assert report.replicated_bytes == 24
    table = str(report).splitlines()
    assert table[0] == "Split over tensor=2:"
    assert table[-1].split() == ["total", f"{report.bytes_per_rank:,}", "24"]
    assert len(table) == len(rows) + 5


def test_known_plans_are_plans():
    for plan in (plans.GPT2, plans.LLAMA):
        assert set(plan.values()) <= set(plans.KINDS)


def test_a_plan_that_is_found():
    from tfdist.tensor_parallel import find_plan

    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(64, 8, name="tokens")(inputs)
    x = keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x)
    x = keras.layers.LayerNormalization(name="norm")(x)
    model = keras.Model(inputs, keras.layers.Dense(64, name="head")(x))
    assert find_plan(model) == {
        "tokens/embeddings": "vocabulary",
        "attention/query/kernel": "column",
        "attention/key/kernel": "column",
        "attention/value/kernel": "column",
        "attention/attention_output/kernel": "row",
        "head/kernel": "vocabulary",
    }
    with pytest.raises(
        ValueError, match="attention layer, feed-forward block or table of tokens was not found"
    ):
        find_plan(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
