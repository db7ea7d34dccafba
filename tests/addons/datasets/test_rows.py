"""Sources with random access: each rank reads its rows, and a resumed training none before its place."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from tests.addons.datasets import row_programs
from tests.conftest import on_ranks
from tfdist.addons.datasets import row_dataset

SIZE = row_programs.SIZE
KINDS = ["list", "grain", "array_record", "datasets"]
_PACKAGES = {"grain": "grain", "array_record": "array_record", "datasets": "datasets"}


def check(found, right) -> None:
    for value, other in zip(found, right, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_results_of_arrays(one_process, tmp_path, kind):
    if kind in _PACKAGES:
        pytest.importorskip(_PACKAGES[kind])
    ((right, _, _, _),) = one_process.run(row_programs.fitted, {}, "arrays", "", None)
    ((found, read, _, _),) = one_process.run(row_programs.fitted, {}, kind, str(tmp_path), None)
    check(found, right)
    assert collections.Counter(read) == dict.fromkeys(range(SIZE), 3)


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
@pytest.mark.parametrize("kind", ["list", "grain", "array_record"])
def test_each_rank_reads_its_rows(pool, one_process, tmp_path, kind):
    if kind in _PACKAGES:
        pytest.importorskip(_PACKAGES[kind])
    ((right, _, losses, _),) = one_process.run(row_programs.fitted, {}, "arrays", "", None)
    found = pool.run(row_programs.fitted, {}, kind, str(tmp_path), None)
    reads = collections.Counter(index for _, read, _, _ in found for index in read)
    # All rows once in each of three epochs, and each rank its part of each batch.
    assert reads == dict.fromkeys(range(SIZE), 3)
    share = SIZE / len(found)
    for weights, read, own, _ in found:
        check(weights, right)
        np.testing.assert_allclose(own, losses, rtol=1e-5)
        assert share - 3 <= len(read) / 3 <= share + 3


@on_ranks(("horovod", 2), slow=[("tensorflow", 3), ("local", 1)])
@pytest.mark.parametrize("seed", [None, 5])
def test_resume_reads_nothing_before_its_place(pool, tmp_path, seed):
    """Near the end of the second of three epochs of 10 batches."""
    options = {"kind": "list", "shuffle_seed": seed, "batch_size": 5, "saves": True}
    whole = pool.run(row_programs.fitted, {}, folder=str(tmp_path / "whole"), stop=None, **options)
    folder = str(tmp_path / "stopped")
    pool.run(row_programs.fitted, {}, folder=folder, stop=19, **options)
    rest = pool.run(row_programs.fitted, {}, folder=folder, stop=None, **options)
    reads = collections.Counter(index for _, read, _, _ in rest for index in read)
    # Of the 20 batches of two epochs, a few may not be saved yet.
    done = rest[0][3]
    assert 14 <= done <= 19 and sum(reads.values()) == 150 - 5 * done
    if seed is None:
        assert all(reads[row] == 1 for row in range(5 * (done - 10)))
    for (weights, _, losses, _), (right, _, all_losses, _) in zip(rest, whole, strict=True):
        for value, other in zip(weights, right, strict=True):
            np.testing.assert_array_equal(value, other)
        assert losses[-1] == all_losses[-1]


@on_ranks(("horovod", 2), slow=[("tensorflow", 3), ("local", 1)])
@pytest.mark.parametrize(
    ("shuffle", "workers", "steps"),
    [
        (True, 1, None),
        (True, 2, 4),
        pytest.param(False, 1, None, marks=pytest.mark.slow),
        pytest.param(True, 3, None, marks=pytest.mark.slow),
    ],
)
def test_a_py_dataset_resumes_by_index(pool, tmp_path, shuffle, workers, steps):
    """Also in the middle of an epoch of 4 of the 10 batches."""
    options = {"kind": "py", "batch_size": 5, "saves": True, "epochs": 3 if steps is None else 6}
    options |= {"shuffle": shuffle, "workers": workers, "steps_per_epoch": steps}
    whole = pool.run(row_programs.fitted, {}, folder=str(tmp_path / "whole"), stop=None, **options)
    folder = str(tmp_path / "stopped")
    pool.run(row_programs.fitted, {}, folder=folder, stop=18, **options)
    rest = pool.run(row_programs.fitted, {}, folder=folder, stop=None, **options)
    for (weights, read, losses, done), (right, all_read, all_losses, _) in zip(
        rest, whole, strict=True
    ):
        assert 13 <= done <= 18
        # Keras reads two batches for their shapes.
        assert read[:10] == all_read[:10] == list(range(10))
        assert read[10:] == all_read[10 + 5 * done :] or workers > 1
        assert len(read) == len(all_read) - 5 * done
        for value, other in zip(weights, right, strict=True):
            np.testing.assert_array_equal(value, other)
        assert losses[-1] == all_losses[-1]


@on_ranks(("horovod", 2))
def test_another_batch_size_after_a_restart(pool, tmp_path):
    """The rows that are left of the epoch, once each."""
    options = {"kind": "list", "shuffle_seed": 3, "saves": True, "epochs": 1}
    folder = str(tmp_path)
    before = pool.run(row_programs.fitted, {}, folder=folder, stop=4, batch_size=5, **options)
    after = pool.run(row_programs.fitted, {}, folder=folder, stop=None, batch_size=6, **options)
    reads = collections.Counter(index for _, read, _, _ in after for index in read)
    assert before and set(reads.values()) == {1} and sum(reads.values()) == 50 - 5 * after[0][3]


@on_ranks(("horovod", 2))
def test_orders(pool, one_process):
    (own,) = one_process.run(row_programs.batches, 7, 3, 23)
    assert all(sorted(order) == list(range(23)) for order in own)
    assert own[0] != own[1] != own[2] and own[0] != list(range(23))
    assert pool.run(row_programs.batches, 7, 3, 23) == [own] * 2
    assert one_process.run(row_programs.batches, 8, 1, 23) != [own[:1]]
    assert one_process.run(row_programs.batches, 7, 1, 1) == [[[0]]]


def test_structures():
    rows = [{"a": (np.float32([place, 1]), b"text"), "b": place} for place in range(3)]
    (batch,) = row_dataset(rows, 4)
    assert batch["a"][0].shape == (3, 2) and batch["a"][1].numpy().tolist() == [b"text"] * 3
    assert batch["b"].numpy().tolist() == [0, 1, 2]
    (batch,) = row_dataset(rows, 3, columns=("b", ["a", "b"]))
    assert batch[0].numpy().tolist() == [0, 1, 2] and set(batch[1]) == {"a", "b"}
    assert len(list(row_dataset(rows, 2, drop_remainder=True))) == 1


@pytest.mark.parametrize(
    ("source", "arguments", "error", "words"),
    [
        (iter([1]), {}, TypeError, "`source` must be"),
        ([], {}, ValueError, "at least one row"),
        ([1], {"batch_size": 2, "drop_remainder": True}, ValueError, "at least one whole batch"),
        ([1], {"batch_size": 0}, ValueError, "batch_size"),
        ([{"a": 1}], {"columns": []}, ValueError, "columns"),
        ([{"a": 1}], {"columns": "a"}, ValueError, "columns"),
        ([{"a": 1}], {"columns": ("b",)}, KeyError, "b"),
        ([1], {"shuffle_seed": -1}, ValueError, "shuffle_seed"),
    ],
)
def test_wrong_arguments(source, arguments, error, words):
    with pytest.raises(error, match=words):
        row_dataset(source, **{"batch_size": 4, **arguments})
