"""GPT on tensor and data x tensor meshes against one process."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import on_ranks
from tests.models import gpt_programs as programs

TWO, FOUR, SQUARE = {"data": 1, "tensor": 2}, {"data": 1, "tensor": 4}, {"data": 2, "tensor": 2}
#: What the variants of the model change, each together with others.
VARIANTS = {
    "gpt2": {},
    "llama": {
        "positions": "rotary",
        "activation": "swiglu",
        "tied_head": False,
        "use_bias": False,
        "normalization": "rms",
        "head_dim": 24,
    },
    "experts": {
        "num_experts": 4,
        "experts": {"z_loss": 0.01, "shared_hidden_dim": 16, "shared_gate": True},
    },
}
_single: dict = {}


def single(one_process, **options):
    """The single process's outcome, trained once for all that compare with it."""
    key = repr(sorted(options.items()))
    if key not in _single:
        _single[key] = one_process.run(programs.train, None, timeout=240, **options)[0]
    return _single[key]


def check_parity(pool, one_process, mesh, sequence_parallel, variant, **options):
    options = {**VARIANTS[variant], **options}
    right = single(one_process, **options)
    outcomes = pool.run(
        programs.train, mesh, timeout=300, sequence_parallel=sequence_parallel, **options
    )
    assert right.losses[programs.STEPS - 1] < 0.9 * right.losses[0]
    for outcome in outcomes:
        assert outcome.losses[0] == pytest.approx(right.losses[0], rel=1e-6)
        assert outcome.losses == pytest.approx(right.losses, rel=1e-4)
        assert outcome.evaluation == pytest.approx(right.evaluation, rel=1e-4)
        np.testing.assert_allclose(outcome.predictions, right.predictions, atol=1e-3)
        for kind in ("weights", "slots"):
            found, expected = getattr(outcome, kind), getattr(right, kind)
            assert len(found) == len(expected)
            for (name, value), other in zip(found.items(), expected.values(), strict=True):
                np.testing.assert_allclose(value, other, atol=2e-4, err_msg=name)


slow = pytest.mark.slow


@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    ("sequence_parallel", "variant"),
    [
        pytest.param(False, "gpt2", id="whole-gpt2", marks=slow),
        pytest.param(True, "llama", id="sequence-llama"),
        pytest.param(True, "gpt2", id="sequence-gpt2", marks=slow),
        pytest.param(False, "llama", id="whole-llama", marks=slow),
        pytest.param(True, "experts", id="sequence-experts", marks=slow),
    ],
)
def test_two_tensor_ranks(pool, one_process, sequence_parallel, variant):
    check_parity(pool, one_process, TWO, sequence_parallel, variant)


@slow
@on_ranks(("tensorflow", 4))
def test_data_and_tensor_ranks(pool, one_process):
    check_parity(pool, one_process, SQUARE, True, "gpt2")


@slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
def test_expert_and_tensor_ranks(pool, one_process, sequence_parallel):
    mesh = {"data": 1, "expert": 2, "tensor": 2}
    check_parity(pool, one_process, mesh, sequence_parallel, "experts")


@slow
@on_ranks(("horovod", 4), ("tensorflow", 4))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mesh", [FOUR, SQUARE], ids=["tensor-4", "2x2"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
def test_four_ranks_in_all_ways(pool, one_process, mesh, sequence_parallel, variant):
    check_parity(pool, one_process, mesh, sequence_parallel, variant)


@slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("optimizer", ["adam", "clipnorm"])
def test_norms_decay_and_averages(pool, one_process, optimizer):
    options = {"optimizer": optimizer, "evaluate": False}
    check_parity(pool, one_process, TWO, True, "gpt2", **options)


@slow
@on_ranks(("horovod", 2))
def test_stock_loss_and_metric_see_whole_logits(pool, one_process):
    check_parity(pool, one_process, TWO, False, "gpt2", stock_loss=True)


@slow
@on_ranks(("tensorflow", 4))
@pytest.mark.parametrize("rows", [programs.BATCH * 2 + 3])
def test_uneven_batches(pool, one_process, rows):
    check_parity(
        pool, one_process, SQUARE, False, "gpt2", rows=rows, optimizer="adam", evaluate=False
    )


@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    "sequence_parallel",
    [pytest.param(False, id="whole"), pytest.param(True, id="slice")],
)
@slow
def test_dropout_repeats_bit_for_bit(pool, sequence_parallel):
    options = {"dropout": 0.2, "sequence_parallel": sequence_parallel, "evaluate": False}
    options["timeout"] = 240
    first, again = (pool.run(programs.train, TWO, **options) for _ in range(2))
    other = pool.run(programs.train, TWO, seed=4, **options)[0]
    assert first[0].losses == first[1].losses == again[0].losses == again[1].losses
    assert first[0].losses != other.losses
    for rank in (0, 1):
        for name, value in first[rank].weights.items():
            np.testing.assert_array_equal(value, again[rank].weights[name])
            np.testing.assert_array_equal(value, first[0].weights[name])


@on_ranks(("horovod", 2), slow=[("tensorflow", 4)])
def test_collectives_of_a_block(pool):
    horovod = pool.engine == "horovod"
    mesh = {"data": 1, "tensor": pool.num_ranks}
    for counts in pool.run(programs.collectives_of_block, mesh, False, timeout=120):
        kind = "all_reduce" if horovod else "CollectiveReduceV2"
        assert counts == {"forward": {kind: 2}, "both": {kind: 4}}
    if horovod:
        for counts in pool.run(programs.collectives_of_block, mesh, True, timeout=120):
            assert counts == {
                "forward": {"all_gather": 2, "reduce_scatter": 2},
                "both": {"all_gather": 4, "reduce_scatter": 4},
            }


@on_ranks(("horovod", 2), slow=[("tensorflow", 4)])
def test_bytes_of_a_rank(pool):
    mesh = {"data": 1, "tensor": pool.num_ranks}
    # Wide enough that the padding of the vocabulary is within the bound.
    options = {"width": 64, "num_heads": 4}
    for found in pool.run(programs.bytes_of_rank, mesh, timeout=120, **options):
        for live, expected in zip(found["live"], found["expected"], strict=True):
            assert live == pytest.approx(expected, rel=0.02)
        assert found["split"][0] > 0.9 * found["live"][0] * pool.num_ranks * 0.9


def check_same_course(first, second):
    """Predictions, the losses of the steps that follow, and where they lead."""
    (predictions, losses, weights), (other_predictions, other_losses, other_weights) = first, second
    np.testing.assert_allclose(other_predictions, predictions, atol=1e-3)
    # The optimizer's state came along: without it the steps would go elsewhere.
    assert other_losses == pytest.approx(losses, rel=1e-4)
    for value, other in zip(weights.values(), other_weights.values(), strict=True):
        np.testing.assert_allclose(other, value, atol=2e-4)


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("variant", VARIANTS)
@slow
def test_a_saved_model_loads_on_one_device_and_on_ranks(pool, one_process, variant, tmp_path):
    path = str(tmp_path / "split.keras")
    right = pool.run(programs.save, TWO, path, timeout=240, **VARIANTS[variant])[0]
    check_same_course(right, one_process.run(programs.load, None, path, timeout=240)[0])
    check_same_course(right, pool.run(programs.load, TWO, path, timeout=240)[1])


@slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_of_one_device_loads_on_ranks(pool, one_process, variant, tmp_path):
    path = str(tmp_path / "alone.keras")
    right = one_process.run(programs.save, None, path, timeout=240, **VARIANTS[variant])[0]
    check_same_course(right, pool.run(programs.load, TWO, path, timeout=240)[0])


def wrong_sizes():
    """What a rank is told where sizes do not divide by the tensor axis."""
    import keras

    from tfdist import layers
    from tfdist.testing import strategy

    said = {}
    attempts = {
        "units": lambda: layers.ColumnParallelDense(7),
        "activation": lambda: layers.ColumnParallelDense(8, activation="softmax"),
        "features": lambda: layers.RowParallelDense(4, input_is_parallel=False).build((2, 7)),
        "num_heads": lambda: programs.build(num_heads=1),
        "num_key_value_heads": lambda: programs.build(num_key_value_heads=1),
        "hidden_dim": lambda: programs.build(hidden_dim=33),
        "sequence": lambda: programs.build(sequence_parallel=True, max_length=15),
        "regularizer": lambda: layers.ColumnParallelDense(
            8, kernel_regularizer=keras.regularizers.OrthogonalRegularizer()
        ).build((2, 4)),
        "lora": lambda: layers.RowParallelDense(8, lora_rank=2),
        "whole input": lambda: keras.Sequential(
            [keras.Input((2, 2, 3)), keras.layers.Flatten(), layers.RowParallelDense(4)]
        ),
        "whole dense": lambda: keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(6, name="before"),
                keras.layers.ReLU(),
                layers.Dropout(0.5),
                layers.RowParallelDense(4),
            ]
        ),
        "whole gathered": lambda: layers.RowParallelDense(4)(
            layers.ColumnParallelDense(6, gather_output=True, name="joined")(keras.Input((8,)))
        ),
        # Of these it is known that the input is split, or not known what it is.
        "split": lambda: keras.Sequential(
            [
                keras.Input((8,)),
                layers.ColumnParallelDense(6),
                keras.layers.ReLU(),
                keras.layers.LayerNormalization(),
                layers.RowParallelDense(4),
            ]
        ),
        "by hand": lambda: layers.RowParallelDense(4)(keras.Input((8,))[:, :4]),
        "not parallel": lambda: keras.Sequential(
            [keras.Input((8,)), layers.RowParallelDense(4, input_is_parallel=False)]
        ),
        "constraint": lambda: layers.ColumnParallelDense(8, kernel_constraint="max_norm").build(
            (2, 4)
        ),
    }
    from tfdist import Mesh

    with strategy(Mesh(data=1, tensor=2)).scope():
        for name, attempt in attempts.items():
            try:
                attempt()
            except ValueError as error:
                said[name] = str(error)
        model = programs.build()
        for optimizer in (keras.optimizers.Lamb(), keras.optimizers.Adafactor()):
            model.compile(optimizer, layers.VocabParallelCrossEntropy(61))
            try:
                model.fit(*programs.text(8, 61), batch_size=8, verbose=0)
            except ValueError as error:
                said[optimizer.name] = str(error)
    return said


@on_ranks(("horovod", 2))
def test_what_does_not_fit_is_one_clear_error(pool):
    said = pool.run(wrong_sizes, timeout=120)[0]
    assert "units=7" in said["units"] and "tensor=2" in said["units"]
    assert "softmax" in said["activation"] and "gather_output" in said["activation"]
    assert "features=7" in said["features"]
    assert "all 12 features" in said["whole input"] and "the input `" in said["whole input"]
    assert "Received: the output of `before`" in said["whole dense"]
    assert "Received: the output of `joined`" in said["whole gathered"]
    for name in ("whole input", "whole dense", "whole gathered"):
        assert "input_is_parallel=False" in said[name]
    assert not {"split", "by hand", "not parallel"} & said.keys(), said
    assert "num_heads=1" in said["num_heads"]
    assert "num_key_value_heads=1" in said["num_key_value_heads"]
    assert "hidden_dim=33" in said["hidden_dim"]
    assert "15" in said["sequence"]
    assert "Orthogonal" in said["regularizer"]
    assert "`lora_rank` of `row_parallel_dense" in said["lora"]
    assert "MaxNorm" in said["constraint"]
    assert "Lamb" in said["lamb"] and "AdamW" in said["lamb"]
    assert "Adafactor" in said["adafactor"]
