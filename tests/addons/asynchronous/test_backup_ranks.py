"""Backup ranks: updates that do not wait for the slowest, and what becomes of its gradients."""

from __future__ import annotations

import keras
import pytest

from tests.addons.asynchronous.runs import run
from tfdist.addons.asynchronous import ParameterServerStrategy
from tfdist.addons.asynchronous.parameter_server_fit import _CatchingUp
from tfdist.addons.asynchronous.round import Round
from tfdist.addons.asynchronous.statistics import Staleness
from tfdist.addons.asynchronous.store import ParameterStore


def check_counts(
    found: dict[int, dict], workers: int, taken: int, steps: int | None = None
) -> None:
    """Every step of every worker is accounted for, and each update took as many gradients.

    `steps` are those of each worker, where an execution has several.
    """
    assert sorted(found) == list(range(workers))
    for worker, each in found.items():
        (in_time,), (dropped,) = each["updates"], each["dropped"]
        skipped = each["history"]["skipped_batches"][-1]
        assert in_time[worker] + dropped[worker] + skipped == (steps or each["steps"])
        assert len(in_time) == workers
        assert sum(in_time) == taken * found[0]["iterations"]
        # A rank that comes back is in step: all end with one model.
        assert each["weights"] == pytest.approx(found[0]["weights"], abs=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_slow_rank_sends_is_left_out_where_there_is_a_backup(tmp_path):
    """It is too late in most steps, and is counted."""
    options = {"step_seconds": 0.05, "epochs": 4, "batch_size": 16, "slow": 3, "slower": 10}
    code, output, found = run(tmp_path, np=4, backup=1, timeout=280, **options)
    assert code == 0, output
    check_counts(found, 4, 3)
    steps = found[0]["steps"]
    assert found[0]["iterations"] == steps
    # It takes part once in ten steps or so, and nothing of what it does is in time but by chance.
    (dropped,) = found[0]["dropped"]
    assert dropped[3] >= 3 and found[3]["history"]["skipped_batches"][-1] > steps / 2
    assert found[0]["history"]["loss"][-1] < 0.8 * found[0]["history"]["loss"][0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_with_a_backup_the_digits_are_learned(tmp_path):
    code, output, found = run(
        tmp_path,
        np=4,
        backup=1,
        slow=3,
        slower=10,
        step_seconds=0.01,
        epochs=40,
        digits=True,
        batch_size=24,
        timeout=270,
    )
    assert code == 0, output
    check_counts(found, 4, 3)
    assert found[0]["accuracy"] >= 0.95


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_backup_stands_for_a_rank_that_is_killed(tmp_path):
    """And where too few are left, that is said."""
    options = {"np": 3, "epochs": 4, "dies": 1, "step_seconds": 0.02, "worker_timeout": 3.0}
    folder = tmp_path / "one"
    folder.mkdir()
    code, output, found = run(folder, backup=1, **options)
    assert code == 0, output
    assert sorted(found) == [0, 2] and found[0]["iterations"] == 80
    folder = tmp_path / "none"
    folder.mkdir()
    code, output, found = run(folder, backup=0, **options)
    assert code != 0 and not found
    assert "An update requires 3 gradients. Received: 2 workers left." in output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_batches_that_do_not_divide_are_left_out_at_the_end(tmp_path):
    """Worker 0 has a batch more than the others in each of three epochs."""
    code, output, found = run(tmp_path, np=3, backup=0, epochs=3, batch_size=15, timeout=200)
    assert code == 0, output
    check_counts(found, 3, 3)
    assert found[0]["iterations"] == 3 * 21
    # It had sent one when it heard that the others were at their end.
    assert found[0]["updates"] == [[63, 63, 63]] and found[0]["dropped"] == [[1, 0, 0]]
    assert found[0]["history"]["skipped_batches"][-1] == 2


def test_what_does_not_go_with_backup_ranks():
    with pytest.raises(ValueError, match="backup_ranks=1, 1 worker"):
        ParameterServerStrategy(backup_ranks=1)
    with pytest.raises(ValueError, match="cannot be combined with `max_staleness`"):
        ParameterServerStrategy(backup_ranks=0, max_staleness=2)


#: By name, workers and backups; which of them are held, where and at which execution; and how many steps
#: that has. Worker 0 lets these come so far first, so that what they sent last was in time.
_HELD = {
    "as-many": (2, 1, [1], "after", 4, 1),
    "more": (3, 2, [1, 2], "after", 4, 1),
    "data-as-many": (2, 1, [1], "batch", 5, 1),
    "data-more": (3, 2, [1, 2], "batch", 5, 1),
    "fewer": (3, 1, [2], "after", 4, 1),
    "executions": (3, 1, [2], "after", 1, 4),
    "executions-data-more": (3, 2, [1, 2], "batch", 5, 4),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", _HELD)
def test_workers_that_are_held_make_no_update_after_the_last_step(tmp_path, name):
    """They come back when the others are at their end, and leave out what these have made."""
    workers, backups, held, where, place, execution = _HELD[name]
    steps = 10 if workers == 3 else 15
    executions = -(-steps // execution)
    code, output, found = run(
        tmp_path,
        np=workers,
        backup=backups,
        batch_size=32,
        epochs=1,
        step_seconds=0.02,
        execution=execution,
        held={
            "workers": held,
            where: place,
            "reached": place if where == "after" else place // execution,
            "until": executions,
        },
        timeout=240,
    )
    assert code == 0, output
    assert found[0]["iterations"] == steps
    check_counts(found, workers, workers - backups, steps)
    for worker in held:
        # One that is held in the data has begun a step, whose gradient comes too late.
        begun = place * execution if where == "after" else place + 1
        assert found[worker]["history"]["skipped_batches"][-1] >= steps - begun
    assert found[0]["steps"] == executions


def test_a_worker_that_is_late_catches_up():
    steps = Round(1)
    assert not steps.is_behind()  # Nothing is known yet.
    steps.note_push([0, 0])
    assert not steps.is_over([1, 0]) and steps.is_over([1, 1]) and not steps.is_behind()
    # Meanwhile the others made four more; the server that is behind decides.
    steps.note_push([6, 5])
    assert steps.is_over([6, 5])
    for _ in range(3):
        assert steps.is_behind()
        steps.skip()
    assert not steps.is_behind() and (steps.step, steps.skipped) == (5, 3)


def test_a_gradient_counts_for_the_step_of_its_batch_alone():
    """Others made updates between this worker's look and its read: it may be that no step is left."""
    pushed = []

    class Hosted:
        parameters: list = []

        def push(self, kinds, grads, deltas, rate, more, then, shard):
            pushed.append(then)
            return [9, 8], [None]

    class Members:
        table_after, feeds = None, []

        def tick(self):
            return ()

        def see(self, table):
            pass

    store = ParameterStore.__new__(ParameterStore)
    store._round, store.members, store.staleness = Round(1), Members(), Staleness()
    store._then = {}
    for step in (0, 1):
        store._versions = [9, 8]
        store._write(Hosted(), [], [], 0.1, [])
        assert pushed[step] == [step, step]


class Behind:
    """Servers that are so many steps ahead; counts what is left out."""

    skipped = 0

    def __init__(self, ahead=1_000):
        self._ahead = ahead

    def is_behind(self):
        return self.skipped < self._ahead

    def skip(self):
        self.skipped += 1


def test_what_is_left_out_at_the_end_of_the_data_is_not_counted():
    """Keras asks for a batch more where it does not know how many there are."""
    store, model = Behind(), keras.Model()
    catching_up = _CatchingUp(model, store)
    batches = iter("abc")
    catching_up._step(next, batches)  # The first is not left out.
    for _ in range(2):
        catching_up._step(next, batches)
    with pytest.raises(StopIteration):
        catching_up._step(next, batches)
    assert store.skipped == 2 and catching_up._logs == "a"


@pytest.mark.parametrize("ahead", [0, 1, 2, 3, 4, 5, 9])
def test_a_part_of_an_execution_is_left_out(ahead):
    """With four steps in each of 11: in the first the worker is in step, in the last there are three."""
    store, model = Behind(ahead), keras.Model()
    model.steps_per_execution = 4
    catching_up, batches, made = _CatchingUp(model, store), iter(range(11)), []

    def function(iterator):
        made.extend(iterator)
        return made[-1]

    for _ in range(3):
        catching_up._step(function, batches)
    with pytest.raises(StopIteration):
        catching_up._step(function, batches)
    left_out = min(ahead, 10)
    # The first step of all shows what the others return.
    assert made == [0, *range(1 + left_out, 11)] and store.skipped == left_out
