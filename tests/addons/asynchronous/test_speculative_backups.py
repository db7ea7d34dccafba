"""Backups that redo the batches of slow workers: the weights are those of the workers alone."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.addons.asynchronous import speculative_programs as programs
from tests.addons.asynchronous.runs import run
from tfdist.addons.asynchronous import ParameterServerStrategy
from tfdist.addons.asynchronous.batches import shard_whole_steps
from tfdist.addons.asynchronous.errors import ParameterServerError
from tfdist.addons.asynchronous.parameter_server_checks import check_backup
from tfdist.addons.asynchronous.speculation import BackupRound, SpeculativeRound, round_of
from tfdist.addons.asynchronous.speculative_part import Missing
from tfdist.data.sharding import mark_per_rank

_EPOCHS = 3


def weights_of(folder, worker: int) -> list[np.ndarray]:
    with np.load(folder / f"weights{worker}.npz") as file:
        return [file[name] for name in file.files]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The weights of two workers without backups, by the number of servers and the batch."""
    made: dict = {}

    def weights(ps: int = 1, batch_size: int = 16) -> list[np.ndarray]:
        if (ps, batch_size) not in made:
            folder = tmp_path_factory.mktemp("alone")
            options = {"ps": ps, "batch_size": batch_size, "epochs": _EPOCHS}
            code, output, _ = run(folder, np=2, backup=0, **options)
            assert code == 0, output
            made[ps, batch_size] = weights_of(folder, 0)
        return made[ps, batch_size]

    return weights


def check(folder, found: dict[int, dict], expected: list[np.ndarray], steps: int) -> None:
    """The weights are the expected ones, and every batch counted once."""
    for worker in found:
        for one, other in zip(weights_of(folder, worker), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert found[0]["iterations"] == steps
    for each in found.values():
        servers = zip(each["updates"], each["redone"], each["dropped"], strict=True)
        for updates, redone, _ in servers:
            # Of each worker's batches its own gradient or a backup's.
            assert [updates[i] + redone[i] for i in (0, 1)] == [steps, steps]
            assert sum(updates[2:]) == sum(redone) and not any(redone[2:])
    for worker in (0, 1):
        if worker in found:
            each = found[worker]
            skipped = each["history"]["skipped_batches"][-1]
            for updates, dropped in zip(each["updates"], each["dropped"], strict=True):
                assert updates[worker] + dropped[worker] + skipped == each["steps"] == steps


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_backup_redoes_the_batches_of_a_slow_worker(tmp_path, alone):
    options = {"step_seconds": 0.05, "slow": 1, "slower": 10, "epochs": _EPOCHS}
    code, output, found = run(tmp_path, np=3, backup=1, speculative=True, timeout=280, **options)
    assert code == 0, output
    assert sorted(found) == [0, 1, 2]
    check(tmp_path, found, alone(), 30 * _EPOCHS)
    assert found[0]["redone"][0][1] > 0.7 * 30 * _EPOCHS
    assert found[0]["history"]["redone_of_worker_1"][-1] == found[0]["redone"][0][1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_backup_redoes_the_batches_of_a_worker_that_is_killed(tmp_path, alone):
    options = {"dies": 1, "epochs": _EPOCHS, "step_seconds": 0.02, "worker_timeout": 3.0}
    code, output, found = run(tmp_path, np=3, backup=1, speculative=True, **options)
    assert code == 0, output
    assert sorted(found) == [0, 2]
    check(tmp_path, found, alone(), 30 * _EPOCHS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_where_nobody_is_slow_weights_are_the_same_too(tmp_path, alone):
    """Here with more backups than one, two servers, and batches that do not divide."""
    options = {"ps": 2, "batch_size": 15, "epochs": _EPOCHS}
    code, output, found = run(tmp_path, np=4, backup=2, speculative=True, **options)
    assert code == 0, output
    check(tmp_path, found, alone(2, 15), 32 * _EPOCHS)


def test_a_gradient_of_each_batch_counts_once(one_process):
    found = one_process.run(programs.calls_of_servers, timeout=100)[0]
    assert found["sent"] == [[n, n] for n in (0, 0, 0, 1, 1, 1, 1, 2)]
    assert found["versions"] == [2, 2]
    # Means of 1 and 3, and of 5 and 7; none of what came second.
    assert found["steps"] == pytest.approx([8.0] * 5)
    assert found["updates"] == [[2, 1, 2]] * 2 and found["dropped"] == [[0, 2, 1]] * 2
    assert found["redone"] == [[0, 2, 0]] * 2
    assert found["missing"] == [[True, False]] * 2
    # Worker 1 was late in step 0, and in step 1 before worker 0, though its backup was before it.
    first, second = 0.25 * 0.0, 0.25 * 2.0
    expected = [first + 0.25 * (0.5 - first), second + 0.25 * (0.0 - second)]
    assert found["slowness"] == [pytest.approx(expected)] * 2
    assert found["withdrawn"] == [[[2, 0, 2]] * 2, [[0, 3, 1]] * 2]


class Servers:
    """A model on servers that are as far as a test says."""

    def __init__(self, *found: tuple[int, list[bool], list[float]]):
        self.found = found

    def missing(self) -> list[Missing]:
        return [Missing(n, np.array(which), np.array(slow)) for n, which, slow in self.found]


class Members:
    """Workers of which a test says which take part, and which are in their `fit`."""

    def __init__(self, present: list[bool], fitting: list[bool]):
        self._answer = np.array(present), np.array(fitting)

    def present(self):
        return self._answer


ALL = Members([True] * 4, [True] * 4)


def test_what_a_backup_redoes_first():
    steps = BackupRound(3, 0)
    # Before its first gradient there is nothing to ask about.
    assert steps.next_shard(None, ALL) == 0
    servers = Servers((0, [True, True, True], [0.1, 2.0, 0.3]))
    assert steps.next_shard(servers, ALL) == 1
    # Another begins with the next slowest, a third with the next again.
    for number, shard in ((1, 2), (2, 0), (3, 1)):
        other = BackupRound(3, number)
        assert other.next_shard(servers, ALL) == shard
    # It waits for who is not slow, as long as it takes to redo a batch; the rest is there.
    steps._begun -= 0.2
    servers.found = ((0, [False, False, True], [0.1, 2.0, 0.3]),)
    began = steps._begun
    assert steps.next_shard(servers, ALL) == 2
    assert steps._begun - began >= 0.4
    # It does not wait for who is.
    steps._begun -= 3600
    servers.found = ((0, [True, False, False], [1.5, 2.0, 0.3]),)
    assert steps.next_shard(servers, ALL) == 0
    # Of several servers those count that are behind.
    servers.found = ((1, [True, True, True], [0.0, 9.0, 0.0]), (0, [False, False, True], [0, 0, 2]))
    assert steps.next_shard(servers, ALL) == 2
    servers.found = (servers.found[0],) * 2
    assert steps.next_shard(servers, ALL) is None and (steps.step, steps.skipped) == (1, 0)
    # Steps that were made without it.
    servers.found = ((3, [True, True, True], [0.0, 0.0, 0.0]),)
    assert [steps.next_shard(servers, ALL) for _ in range(3)] == [None, None, 0]
    assert (steps.step, steps.skipped) == (3, 2)


def test_when_a_backup_ends(monkeypatch):
    monkeypatch.setattr("tfdist.addons.asynchronous.speculation.MEMBERS_SECONDS", 0.0)
    begun, untouched = [[True, False]], [[True, True]]

    def after(members, waiting):
        servers = Servers(*[(0, which, [0.0, 0.0]) for which in waiting])
        steps = BackupRound(2, 0)
        return steps.next_shard(servers, members), steps.is_last

    nobody = [False, False, True]
    # The workers have ended, but what one has sent is to count.
    assert after(Members([True] * 3, nobody), begun) == (0, False)
    assert after(Members([True] * 3, nobody), untouched) == (None, True)
    # One that is left is enough.
    assert after(Members([True] * 3, [False, True, True]), untouched) == (0, False)
    with pytest.raises(ParameterServerError, match="The 2 workers with batches"):
        after(Members(nobody, nobody), begun)


def test_a_worker_with_backups_catches_up():
    steps = round_of(1, 2, speculative=True)
    assert type(steps) is SpeculativeRound and steps.shard == 1
    assert steps.is_one_version([4, 4]) and not steps.is_one_version([4, 5])
    steps.note_push([3, 3])
    for _ in range(2):
        assert steps.is_behind()
        steps.skip()
    assert not steps.is_behind() and steps.step == 3
    enough = [steps.is_enough(np.array(which)) for which in ([1, 1, 0], [1, 0, 1], [1, 0, 0])]
    assert enough == [True, True, False]


_ELEMENTS = {
    "tensor": lambda x: x,
    "dict": lambda x: {"a": x, "b": -x},
    "nest": lambda x: ({"a": x}, (x, -x)),
    "tuple": lambda x: (x,),
    "ragged": lambda x: tf.RaggedTensor.from_row_lengths(x, [1]),
}


@pytest.mark.parametrize("kind", _ELEMENTS)
def test_each_step_has_a_batch_of_each_worker(kind):
    element = tf.autograph.experimental.do_not_convert(_ELEMENTS[kind])
    dataset = tf.data.Dataset.range(8).batch(1).map(element)

    def numbers(found):
        return [int(tf.nest.flatten(each, expand_composites=True)[0][0]) for each in found]

    for index, expected in ((0, [0, 3]), (1, [1, 4]), (2, [2, 5]), (None, [0, 1, 2, 3, 4, 5])):
        sharded = shard_whole_steps(dataset, 3, index)
        assert sharded.element_spec == dataset.element_spec
        assert numbers(sharded) == expected
    assert numbers(shard_whole_steps(dataset, 1, None)) == list(range(8))
    with pytest.raises(NotImplementedError, match="remove `speculative`"):
        shard_whole_steps(mark_per_rank(dataset.take(8)), 3, 0)


def test_all_see_one_order_of_a_data_set_that_is_shuffled():
    def shuffled():
        tf.random.set_seed(3)
        return tf.data.Dataset.range(9).shuffle(9).batch(1)

    found = []
    for index in (0, 1, 2, None):
        sharded = shard_whole_steps(shuffled(), 3, index)
        found.append([[int(each[0]) for each in sharded] for _ in range(2)])
    for epoch in (0, 1):
        steps = zip(*(each[epoch] for each in found[:3]), strict=True)
        assert [each for step in steps for each in step] == found[3][epoch]
    assert found[3][0] != found[3][1]


def test_what_does_not_go_with_speculative():
    for backup_ranks in (None, 0):
        with pytest.raises(ValueError, match="requires `backup_ranks` of 1 or more"):
            ParameterServerStrategy(backup_ranks=backup_ranks, speculative=True)
    with pytest.raises(ValueError, match="backup_ranks=1, 1 worker"):
        ParameterServerStrategy(backup_ranks=1, speculative=True)
    with pytest.raises(ValueError, match="cannot be combined with `max_staleness`"):
        check_backup(1, True, 3, 2, 0.0)
