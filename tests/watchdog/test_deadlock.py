"""The proof that ranks wait for each other, without ranks: what they say, and what follows from it."""

from __future__ import annotations

import json
import threading

import pytest
import tensorflow as tf

from tfdist.collectives.flight_recorder import FlightRecorder
from tfdist.collectives.group import Group
from tfdist.watchdog.deadlock import DeadlockProof, answer
from tfdist.watchdog.report import Report

WORLD = (0, 1, 2)


class World:
    """Ranks that say what they are blocked in, and what each has begun how often."""

    def __init__(self, size: int = 3):
        self.proof = DeadlockProof()
        self.size = size
        self.begun: list[dict[tuple, int]] = [{} for _ in range(size)]
        self.blocked: list[list[dict]] = [[] for _ in range(size)]
        self.question = None
        self.reports = {rank: Report(rank) for rank in range(size)}

    def block(self, rank: int, name: str, ranks=WORLD, needed=None) -> None:
        key = name, ranks
        number = self.begun[rank][key] = self.begun[rank].get(key, 0) + 1
        call = {"name": name, "ranks": ranks, "needed": needed or ranks, "occurrence": number}
        self.blocked[rank] = [call]

    def begin(self, rank: int, name: str, ranks=WORLD) -> None:
        """One that the rank has left again."""
        self.block(rank, name, ranks)
        self.blocked[rank] = []

    def say(self, *ranks: int) -> None:
        for rank in ranks or range(self.size):
            asked, lacks = answer(
                self.question,
                lambda name, group, n, rank=rank: (
                    self.begun[rank].get(
                        (name, group if isinstance(group, range) else tuple(group)), 0
                    )
                    >= n
                ),
            )
            said = Report(
                rank,
                blocked=self.blocked[rank],
                asked=asked,
                lacks=lacks,
                doing=f"train.py:{rank} in main",
            )
            message = json.loads(json.dumps(said.to_message()))
            self.reports[rank] = Report.from_message(message, self.size)

    def ask(self) -> None:
        self.question = json.loads(json.dumps(self.proof.question(self.reports)))

    def verdict(self) -> str:
        return self.proof.verdict(self.reports)

    def judged(self) -> str:
        self.say()
        self.ask()
        self.say()
        return self.verdict()


@pytest.fixture
def world() -> World:
    return World()


def test_two_that_wait_for_each_other(world):
    world.block(0, "all_gather/world/fit/arguments/size")
    world.block(1, "gradients")
    world.block(2, "gradients")
    verdict = world.judged()
    assert verdict.startswith("Rank 0 called `fit` (or `evaluate`, `predict`), ranks 1, 2 did not")
    assert "Ranks 0, 1, 2 wait for each other" in verdict
    assert (
        "rank 0 waits in all_gather/world/fit/arguments/size (call 1), called at train.py:0 in main; "
        "ranks 1, 2 did not reach it." in verdict
    )
    assert "rank 2 waits in gradients (call 1), called at train.py:2 in main" in verdict


def test_a_circle_of_three(world):
    world.block(0, "a", (0, 1))
    world.block(1, "b", (1, 2))
    world.block(2, "c", (0, 2))
    assert "Ranks 0, 1, 2 wait for each other" in world.judged()


def test_who_needs_one_of_them_is_named_too(world):
    world.block(0, "a", (0, 1))
    world.block(1, "b", (0, 1))
    world.block(2, "c", (1, 2))
    assert "rank 2 waits in c (call 1)" in world.judged()


def test_ranks_that_wait_for_one_that_works(world):
    world.block(0, "a")
    world.block(1, "a")
    assert world.judged() == ""
    world.block(2, "b", (1, 2))
    world.block(1, "b", (1, 2))
    assert world.judged() == ""


def test_a_chain_without_a_circle(world):
    """Rank 0 waits for rank 1, and rank 1 for rank 2, which works."""
    world.block(0, "a", (0, 1))
    world.block(1, "b", (1, 2))
    assert world.judged() == ""


def test_a_call_that_the_other_has_left_may_still_end(world):
    """A slow receiver of what the root of a broadcast, which has gone on, has sent."""
    world.begin(1, "weights", (0, 1))
    world.block(0, "weights", (0, 1), needed=(1,))
    world.block(1, "next", (0, 1))
    assert world.judged() == ""


def test_the_root_of_a_broadcast_does_not_wait_for_those_that_need_nothing_of_it(world):
    world.block(0, "weights", needed=(1,))
    world.block(1, "next", needed=(2,))
    assert world.judged() == ""


def test_a_call_that_began_after_the_question_proves_nothing(world):
    world.block(0, "a", (0, 1))
    world.begin(1, "b", (0, 1))
    world.block(2, "other", (1, 2))
    world.say()
    world.ask()
    world.block(1, "b", (0, 1))
    world.say()
    assert world.verdict() == ""
    world.ask()
    world.say()
    assert "Ranks 0, 1, 2 wait for each other" in world.verdict()


def test_a_rank_that_has_not_answered_yet_proves_nothing(world):
    world.block(0, "a", (0, 1))
    world.block(1, "b", (0, 1))
    world.say()
    world.ask()
    world.say(0, 2)
    assert world.verdict() == ""
    world.ask()  # The same question once more.
    world.say(1)
    assert "Ranks 0, 1 wait" in world.verdict()


def test_a_rank_that_never_answers_does_not_hold_up_the_others(world):
    world.block(0, "a", (0, 1))
    world.block(2, "c")
    world.say()
    for _ in range(3):
        world.ask()
        world.say(0, 1)
    world.block(1, "b", (0, 1))
    for _ in range(12):
        world.say(0, 1)
        world.ask()
    world.say(0, 1)
    assert "Ranks 0, 1 wait" in world.verdict()


@pytest.mark.parametrize("end", [{"ended": True}, {"failed": "ValueError: no"}])
def test_a_rank_that_ends_leaves_the_verdict_to_its_end(world, end):
    world.block(0, "a", (0, 1))
    world.block(1, "b", (0, 1))
    world.say()
    world.ask()
    world.say()
    world.reports[1] = Report(1, asked=1, **end)
    assert world.verdict() == ""


def test_nothing_is_asked_while_all_wait_in_one_call(world):
    for rank in WORLD:
        world.block(rank, "save")
    world.say()
    world.ask()
    assert world.question is None


def test_a_question_fits_into_a_message_of_a_large_world():
    size = 1000
    world = World(size)
    everyone = range(size)
    world.block(0, "n" * 500, everyone)
    for rank in range(1, size):
        world.block(rank, f"bucket{rank % 100}", everyone)
    verdict = world.judged()
    assert len(json.dumps(world.question)) < 20_000
    assert "wait for each other" in verdict
    assert len(verdict.splitlines()) < 12


def called(recorder: FlightRecorder, name: str, x, operation, needed=None):
    """What a collective of this name does, counted."""
    flight = recorder.flight(name, Group(WORLD, "world", None), needed=needed)
    with flight.begin(x) as begun:
        result = operation(begun)
    return flight.end(result)


def eagerly(recorder: FlightRecorder, name: str = "eager", operation=tf.identity):
    return called(recorder, name, tf.ones(1), operation)


def seen_inside(recorder: FlightRecorder, in_graph: bool = False, name: str = "eager") -> list:
    """What a watcher sees while this thread is in an eager call."""
    seen = []

    def operation(x):
        seen.extend(blocked(recorder, in_graph))
        return x

    eagerly(recorder, name, operation)
    return seen


def blocked(recorder: FlightRecorder, in_graph: bool = False) -> list:
    main = threading.get_ident()
    return recorder.blocked(main, recorder.in_flight(), lambda: in_graph)


def test_an_eager_call_blocks_its_thread():
    recorder = FlightRecorder()
    eagerly(recorder)
    (call,) = seen_inside(recorder)
    assert (call.name, call.ranks, call.needed, call.occurrence) == ("eager", WORLD, WORLD, 2)
    assert blocked(recorder) == []
    assert recorder.has_begun("eager", WORLD, 2)
    assert not recorder.has_begun("eager", WORLD, 3)
    assert not recorder.has_begun("eager", (0, 1), 1)


def test_nothing_is_certain_where_another_thread_calls_collectives():
    recorder = FlightRecorder()
    begun, end = threading.Event(), threading.Event()

    def other():
        eagerly(recorder, "other")
        begun.set()
        end.wait(30.0)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert begun.wait(30.0)
        assert seen_inside(recorder) == []
    finally:
        end.set()
        thread.join()
    assert len(seen_inside(recorder)) == 1


def test_a_call_that_failed_makes_its_name_uncertain():
    recorder = FlightRecorder()
    with pytest.raises(ZeroDivisionError):
        eagerly(recorder, operation=lambda x: 1 / 0)
    assert seen_inside(recorder) == []
    assert len(seen_inside(recorder, name="another")) == 1


def test_what_a_root_sends_blocks_nobody():
    recorder = FlightRecorder()
    seen = []

    def operation(x):
        seen.extend(blocked(recorder))
        return x

    called(recorder, "broadcast", tf.ones(1), operation, needed=())
    assert seen == []


def test_a_graph_blocks_until_an_exception_may_have_ended_it():
    recorder = FlightRecorder()
    seen = []
    this = threading.get_ident()

    @tf.function
    def step(x, limit):
        def operation(x):
            def look():
                recorder._threads.clear()  # The thread of this callback is TensorFlow's.
                flying = recorder.in_flight()
                seen.append(recorder.blocked(this, flying, lambda: True))
                seen.append(recorder.blocked(this, flying, lambda: False))

            looked = tf.py_function(look, [], [])
            with tf.control_dependencies([looked, tf.debugging.assert_less(x, limit)]):
                return tf.identity(x)

        return called(recorder, "graph", x, operation)

    step(tf.ones(1), tf.constant([2.0]))
    (inside, outside), seen = seen[:2], []
    assert [(call.name, call.occurrence) for call in inside] == [("graph", 1)]
    assert outside == []
    assert blocked(recorder, in_graph=True) == []
    assert recorder.has_begun("graph", WORLD, 9), "a graph may begin it"
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.ones(1), tf.constant([0.0]))
    assert recorder.in_flight(), "it has begun, and will not end"
    assert blocked(recorder, in_graph=True) == []
    # What is left of the graph does not make an eager call uncertain.
    assert len(seen_inside(recorder)) == 1
