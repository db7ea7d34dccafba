"""TensorFlow's own library of tests for strategies, run against the three of tfdist.

`tensorflow.python.distribute.strategy_test_lib` holds no tests but helpers, which the tests of
TensorFlow's strategies call. Each is run here, or stands in a table with the reason why it cannot be.
"""

from __future__ import annotations

import contextlib
import inspect
from unittest import mock

import pytest
import tensorflow as tf
from tensorflow.python.distribute import strategy_test_lib

from tests.conftest import on_ranks
from tests.strategies import programs
from tfdist.collectives.objects import all_gather_object

KINDS = [("horovod", 2), ("tensorflow", 2)]
SLOW_KINDS = [("horovod", 1), ("tensorflow", 1)]

_ITERATOR = (
    "draws from an iterator of TensorFlow 1 over the replicas of one process, which a strategy of "
    "TensorFlow 2 does not make"
)
_CLUSTER = "starts two workers in one process, and runs the strategy on the second by a session"
_WORKER = "expects devices of a job named worker, on a server that its own test case started"
#: Helpers that cannot apply, each with its reason.
LEFT_OUT = {
    "DistributionTestBase": {
        "_test_input_fn_iterator": _ITERATOR,
        "_test_numpy_dataset": "skips itself for all but a `tf.compat.v1.distribute.Strategy`",
    },
    "OneDeviceDistributionTestBase": {
        "_test_device_and_input_device_are_colocated": _CLUSTER,
        "_test_device_and_input_device_are_colocated_with_function": _CLUSTER,
    },
    "RemoteSingleWorkerMirroredStrategyBase": {
        "_testDeviceScope": _WORKER,
        "_testMakeInputFnIteratorWithDataset": _ITERATOR,
        "_testMakeInputFnIteratorWithCallable": _ITERATOR,
    },
}

#: Helpers that cannot apply with an engine, by its name.
NOT_WITH = {
    "tensorflow": {
        "DistributionTestBase._test_minimize_loss_graph": (
            "opens a session of TensorFlow 1 on this process alone, which does not know the devices "
            "of the cluster that the strategy places variables on"
        )
    }
}

#: Helpers that others call, and that are run by them.
CALLED_BY_OTHERS = {
    "DistributionTestBase": {"_input_fn_to_test_input_context"},
    "OneDeviceDistributionTestBase": {
        "_test_collective_comms",
        "_test_collective_comms_gradients",
        "_test_collective_comms_gradient_tape",
    },
    "RemoteSingleWorkerMirroredStrategyBase": {"_get_num_gpus"},
    "TwoDeviceDistributionTestBase": {
        "_test_collective_comms",
        "_test_collective_comms_gradients",
        "_test_collective_comms_gradient_tape",
    },
}


class AllRanks:
    """A strategy as the helpers want it: with TensorFlow 1's iterators, and all ranks' values local.

    The helpers for two devices compare the values of both; here each rank has one, so what they ask
    for is gathered.
    """

    def __init__(self, strategy):
        self._strategy = strategy

    def run(self, fn, args=(), kwargs=None):
        return self._strategy.run(fn, args=args, kwargs=kwargs)

    def make_input_fn_iterator(self, input_fn):
        elements = list(input_fn(None))
        mine = elements[self._strategy.mesh.rank if len(elements) > 1 else 0]
        return _Elements([mine])

    def experimental_run(self, fn, iterator):
        return self._strategy.run(fn, args=(iterator.draw(),))

    def experimental_local_results(self, value):
        if not tf.executing_eagerly():
            return (value,)
        group = self._strategy.group("data")
        values = all_gather_object(tf.convert_to_tensor(value).numpy(), group)
        return tuple(tf.constant(value) for value in values)

    unwrap = experimental_local_results


class _Elements:
    def __init__(self, elements):
        self._elements = elements

    def initialize(self):
        return [] if tf.executing_eagerly() else tf.no_op()

    def draw(self):
        return tf.nest.map_structure(lambda part: tf.constant(part), self._elements.pop(0))


def case_of(kind: str):
    """A test case of the library, outside of any runner."""

    class Case(getattr(strategy_test_lib, kind)):
        def runTest(self):
            raise NotImplementedError

        def _get_num_gpus(self):
            return self.replicas

    return Case()


def plain(name: str):
    """Calls a helper with the strategy alone."""
    return lambda case, strategy: getattr(case, name)(strategy)


def in_a_seeded_graph(name: str):
    """Calls a helper that makes a graph of TensorFlow 1, in which each rank would draw for itself."""

    make = tf.Graph.__init__

    def seeded(graph, *args, **options):
        make(graph, *args, **options)
        graph.seed = 7

    def call(case, strategy):
        with mock.patch.object(tf.Graph, "__init__", seeded):
            return getattr(case, name)(strategy)

    return call


def gathered(name: str, **options):
    """Calls a helper with what looks like a strategy of all ranks' devices."""
    return lambda case, strategy: getattr(case, name)(AllRanks(strategy), **options)


def in_a_graph(name: str):
    """Calls a helper that only works where nothing is eager."""

    def call(case, strategy):
        # A data set cannot be looped over there.
        with tf.Graph().as_default(), case.cached_session():
            given = AllRanks(strategy)
            given.make_input_fn_iterator = lambda _: _Elements([_GRAPH_INPUTS[name]])
            getattr(case, name)(given)

    return call


#: What the helpers put into their data sets, for the one that only works in a graph.
_GRAPH_INPUTS = {"_test_all_reduce_sum_gradients": 4.0, "_test_all_reduce_mean_gradients": 5.0}


def summary_of_replica_zero(case, strategy):
    """Only the first replica writes: the others' files hold nothing but the header."""
    first = strategy.mesh.rank == 0
    with contextlib.nullcontext() if first else pytest.raises(AssertionError, match="2"):
        case._test_summary_for_replica_zero_only(strategy)


def replica_id(case, strategy):
    """The helper counts the replicas of its process: rank 0 is the only one with a number below one."""
    first = strategy.mesh.rank == 0
    with (
        contextlib.nullcontext() if first else pytest.raises(AssertionError, match="not less than")
    ):
        case._test_replica_id(strategy)


def input_context(case, strategy):
    mesh = strategy.mesh
    input_fn = case._input_fn_to_test_input_context(
        lambda: tf.data.Dataset.range(3), mesh.size, mesh.size, mesh.rank
    )
    case._test_input_fn_iterable(strategy, input_fn, [[0], [1], [2]])


EVERYWHERE = {
    "DistributionTestBase": {
        "_test_call_and_merge_exceptions": plain("_test_call_and_merge_exceptions"),
        "_test_global_step_update": plain("_test_global_step_update"),
        "_test_input_fn_iterable": input_context,
        "_test_minimize_loss_eager": plain("_test_minimize_loss_eager"),
        "_test_minimize_loss_graph": in_a_seeded_graph("_test_minimize_loss_graph"),
        "_test_replica_id": replica_id,
        "_test_summary_for_replica_zero_only": summary_of_replica_zero,
        "_test_trainable_variable": plain("_test_trainable_variable"),
    },
    "RemoteSingleWorkerMirroredStrategyBase": {
        "_testMinimizeLoss": plain("_testMinimizeLoss"),
        "_testNumReplicasInSync": plain("_testNumReplicasInSync"),
    },
}
ON_ONE = {
    "OneDeviceDistributionTestBase": {
        "_test_run": plain("_test_run"),
        "_test_all_reduce_sum": gathered("_test_all_reduce_sum"),
        "_test_all_reduce_sum_gradients": in_a_graph("_test_all_reduce_sum_gradients"),
        "_test_all_reduce_sum_gradient_tape": gathered("_test_all_reduce_sum_gradient_tape"),
        "_test_all_reduce_mean": gathered("_test_all_reduce_mean"),
        "_test_all_reduce_mean_gradients": in_a_graph("_test_all_reduce_mean_gradients"),
        "_test_all_reduce_mean_gradient_tape": gathered("_test_all_reduce_mean_gradient_tape"),
    },
}
ON_TWO = {
    "TwoDeviceDistributionTestBase": {
        "_test_run": gathered("_test_run"),
        "_test_all_reduce_sum": gathered("_test_all_reduce_sum"),
        "_test_all_reduce_sum_gradients": gathered(
            "_test_all_reduce_sum_gradients", run_in_function=True
        ),
        "_test_all_reduce_sum_gradient_tape": gathered("_test_all_reduce_sum_gradient_tape"),
        "_test_all_reduce_mean": gathered("_test_all_reduce_mean"),
        "_test_all_reduce_mean_gradients": gathered(
            "_test_all_reduce_mean_gradients", run_in_function=True
        ),
        "_test_all_reduce_mean_gradient_tape": gathered("_test_all_reduce_mean_gradient_tape"),
    },
}


def run_helpers(strategy, *tables) -> list[str]:
    """Runs the helpers of some tables one after the other; returns their names."""
    done = []
    for table in tables:
        for kind, helpers in table.items():
            for name, helper in helpers.items():
                if f"{kind}.{name}" in NOT_WITH.get(strategy.engine.name, ()):
                    continue
                case = case_of(kind)
                case.replicas = strategy.num_replicas_in_sync
                # All ranks draw the same initial values, whatever ran on them before.
                tf.random.set_seed(7)
                try:
                    helper(case, strategy)
                except Exception as error:
                    error.add_note(f"in {kind}.{name}")
                    raise
                done.append(f"{kind}.{name}")
    return done


def names(*tables, engine: str = "") -> list[str]:
    """The helpers of some tables, but those that cannot apply with an engine."""
    all_names = (f"{kind}.{name}" for table in tables for kind in table for name in table[kind])
    return [name for name in all_names if name not in NOT_WITH.get(engine, ())]


@on_ranks(*KINDS)
def test_on_two_ranks(pool):
    done = pool.run(programs.on_rank, run_helpers, EVERYWHERE, ON_TWO)
    assert done == [names(EVERYWHERE, ON_TWO, engine=pool.engine)] * 2


@on_ranks(("local", 1), slow=SLOW_KINDS)
def test_on_one_rank(pool):
    done = pool.run(programs.on_rank, run_helpers, EVERYWHERE, ON_ONE)
    assert done == [names(EVERYWHERE, ON_ONE, engine=pool.engine)]


def test_no_helper_is_left_out_without_a_reason():
    found = {
        f"{kind}.{name}"
        for kind, case in inspect.getmembers(strategy_test_lib, inspect.isclass)
        if case.__module__ == strategy_test_lib.__name__ and issubclass(case, tf.test.TestCase)
        for name, value in vars(case).items()
        if inspect.isfunction(value)
    }
    listed = names(EVERYWHERE, ON_ONE, ON_TWO, LEFT_OUT, CALLED_BY_OTHERS)
    assert found == set(listed)
    assert len(listed) == len(set(listed)), "a helper is both run and left out"
