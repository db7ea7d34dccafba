"""Backup ranks: updates that do not wait for the slowest, and what becomes of its gradients."""

from __future__ import annotations

import keras
import pytest

from tests.strategies.asynchronous_runs import run
from tfdist.asynchronous.round import Round
from tfdist.strategies import ParameterServerStrategy
from tfdist.strategies.parameter_server_fit import _CatchingUp


def check_counts(found: dict[int, dict], workers: int, taken: int) -> None:
    """Every step of every worker is accounted for, and each update took as many gradients."""
    for worker, each in found.items():
        (in_time,), (dropped,) = each["updates"], each["dropped"]
        skipped = each["history"]["skipped_batches"][-1]
        assert in_time[worker] + dropped[worker] + skipped == each["steps"]
        assert len(in_time) == workers
        # A worker may begin a step that no other makes any more.
        assert 0 <= sum(in_time) - taken * found[0]["iterations"] < taken
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
    assert "An update takes 3 gradients, and 2 workers are left." in output


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
    with pytest.raises(ValueError, match="leave out `max_staleness`"):
        ParameterServerStrategy(backup_ranks=0, max_staleness=2)


def test_a_worker_that_is_late_catches_up():
    steps = Round(1)
    assert not steps.is_behind(1)  # Nothing is known yet.
    steps.note_push(then=[0, 0], before=[0, 0])
    assert not steps.was_late and not steps.is_over([1, 0]) and steps.is_over([1, 1])
    # Meanwhile the others made four more; the server that is behind decides.
    steps.note_push(then=[1, 1], before=[6, 5])
    assert steps.was_late and steps.is_over([6, 5])
    for _ in range(3):
        assert steps.is_behind(1)
        steps.skip(1)
    assert not steps.is_behind(1) and (steps.step, steps.skipped) == (5, 3)
    # Several steps at a time are left out as a whole.
    steps.known = [9, 9]
    assert steps.is_behind(3)
    steps.skip(3)
    assert not steps.is_behind(3)


def test_a_gradient_in_time_for_a_later_update_leaves_out_the_step_between():
    """Else two workers that were slow once make an update more at the end."""
    steps = Round(2)
    steps.note_push(then=[0], before=[0])
    assert not steps.is_behind(1)
    # Others made update 1 before this worker read the parameters of its second step.
    steps.note_push(then=[2], before=[2])
    assert not steps.was_late and steps.is_behind(1) and not steps.is_behind(2)
    steps.skip(1)
    assert not steps.is_behind(1) and (steps.step, steps.skipped) == (3, 1)
    # The update is not made yet: the worker still waits for it.
    assert not steps.is_over(steps.known) and steps.is_over([3])


class Behind:
    """Servers that are ahead for good; counts what is left out."""

    skipped = 0

    def is_behind(self, steps):
        return True

    def skip(self, steps):
        self.skipped += steps


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
