"""Sources with random access: each rank reads its rows, and a resumed training none before its place."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf

from tests.addons.datasets import row_programs
from tests.conftest import on_ranks, slow_but
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


#: Whether batches are shuffled, arguments of the dataset, steps of an epoch, and where the training is stopped.
PY_DATASETS = {
    "ordered": (False, {}, None, [19]),
    "shuffled": (True, {}, None, [13, 17]),
    "workers": (True, {"workers": 3}, None, [12, 18]),
    "short-epochs": (True, {"workers": 2}, 4, [14, 17]),
    "processes": (True, {"workers": 2, "use_multiprocessing": True}, None, [13, 17]),
    "without-some": (True, {"workers": 2, "dropped": [1, 4]}, 3, [8, 11]),
}


def same(rest, whole) -> None:
    for (weights, _, losses, _), (right, _, all_losses, _) in zip(rest, whole, strict=True):
        for value, other in zip(weights, right, strict=True):
            np.testing.assert_array_equal(value, other)
        assert losses[-1] == all_losses[-1]


@on_ranks(("horovod", 2), slow=[("tensorflow", 3), ("local", 1)])
@pytest.mark.parametrize("kind", slow_but(["shuffled", "short-epochs"], PY_DATASETS))
def test_a_py_dataset_resumes_by_index(pool, tmp_path, kind):
    """Stopped twice within an epoch, and between epochs."""
    shuffle, arguments, steps, stops = PY_DATASETS[kind]
    options = {"kind": "py", "batch_size": 5, "saves": True, "epochs": 3 if steps is None else 6}
    options |= {"shuffle": shuffle, "steps_per_epoch": steps, "dataset": arguments}
    whole = pool.run(row_programs.fitted, {}, folder=str(tmp_path / "whole"), stop=None, **options)
    folder = str(tmp_path / "stopped")
    for stop in stops:
        pool.run(row_programs.fitted, {}, folder=folder, stop=stop, **options)
    rest = pool.run(row_programs.fitted, {}, folder=folder, stop=None, **options)
    same(rest, whole)
    for (_, read, _, done), (_, all_read, _, _) in zip(rest, whole, strict=True):
        assert stops[-1] - 5 <= done <= stops[-1]
        # Keras reads two batches for their shapes.
        if kind not in ("processes", "without-some"):
            assert read[:10] == all_read[:10] == list(range(10))
            assert read[10:] == all_read[10 + 5 * done :] or "workers" in arguments
            assert len(read) == len(all_read) - 5 * done


@on_ranks(("horovod", 2), slow=[("local", 1)])
@pytest.mark.parametrize("steps", slow_but([10], [None, 10, 5]))
def test_the_next_epoch_of_a_py_dataset_has_another_order(pool, tmp_path, steps):
    options = {"kind": "py", "batch_size": 5, "saves": True, "stop": None}
    options |= {"shuffle": True, "steps_per_epoch": steps, "dataset": {}}
    epochs = 6 if steps == 5 else 3
    folders = [str(tmp_path / name) for name in ("whole", "parts")]
    whole = pool.run(row_programs.fitted, {}, folder=folders[0], epochs=epochs, **options)
    for done in range(epochs // 3, epochs + 1, epochs // 3):
        rest = pool.run(row_programs.fitted, {}, folder=folders[1], epochs=done, **options)
    same(rest, whole)


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


def test_bytes_keep_their_zeros():
    rows = [b"\0\1\0\0", b"\0\0", b"", np.int32([7, 8]).tobytes()]
    (batch,) = row_dataset(rows, 4)
    assert batch.numpy().tolist() == rows
    (batch,) = row_dataset(["a\0", "\0"], 2)
    assert batch.numpy().tolist() == [b"a\0", b"\0"]


def test_integers_are_not_wrapped():
    for rows in ([5_000_000_000, 7], [-(1 << 31) - 1, 7]):
        with pytest.raises(
            tf.errors.OpError, match=rf"Received: array\({rows[0]}\) in row 0\. Make them int64"
        ):
            list(row_dataset(rows, 2))
    wide = [np.asarray(number, np.int64) for number in (5_000_000_000, 7)]
    (batch,) = row_dataset(wide, 2)
    assert batch.numpy().tolist() == [5_000_000_000, 7]


@pytest.mark.parametrize(
    "rows",
    [
        [0.5, 2.7, 3],
        [np.float32([1, 2]), np.float32([1]), np.float32([3, 4])],
        [(1.0, 2.0), None, (3.0, 4.0)],
        [1.0, None, 2.0],
        [(1, 2), (1, 2, 3), (1, 2)],
        ["a", 1, "b"],
    ],
)
def test_rows_unlike_the_last_one(rows):
    """Python's numbers are cast within their kind only."""
    with pytest.raises(tf.errors.OpError, match=r"All rows must have .*Received: row [01], "):
        list(row_dataset(rows, 3))
    (batch,) = row_dataset([1, 2.5, np.float32(3)], 3)
    assert batch.numpy().tolist() == [1, 2.5, 3]


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
