"""Scripts as the examples of Keras write them: any number of ranks trains as one process does."""

from __future__ import annotations

import pytest

from tests.conftest import full_cross
from tests.parity import (
    generative,
    loops,
    losses,
    options,
    sequences,
    similarity,
    structures,
    vision,
)
from tests.parity.comparing import check
from tests.parity.feeding import EVEN, UNEVEN, Feed

MODULES = (generative, losses, loops, options, sequences, similarity, structures, vision)
SCRIPTS = [getattr(module, name) for module in MODULES for name in module.__all__]
FEEDS = [Feed(kind, *size) for kind in ("numpy", "data") for size in (EVEN, UNEVEN)]

#: These bring their rows to the model themselves, or a batch of a fixed size.
OWN_FEEDS = {
    generative.gan_of_batches: ["numpy"],
    loops.batches_by_hand: ["numpy"],
    loops.consistency_of_two_inputs: ["data"],
    loops.custom_loop: ["data"],
    loops.custom_loop_with_metrics: ["data"],
    loops.replay_by_hand: ["numpy"],
    sequences.stateful_rnn: ["data"],
    structures.generator_of_tuples: ["numpy"],
    structures.preprocessing_in_the_model: ["data"],
    structures.py_dataset_of_dicts: ["numpy"],
    structures.py_dataset_with_workers: ["numpy"],
    structures.sparse_rows: ["data"],
}
DIVISIBLE_ONLY = {sequences.stateful_rnn}

#: One of each kind of script: what `make test` runs on the ranks of one engine, and of the other.
SAMPLE = {
    ("horovod", 2): [
        losses.saturated_in_a_list,
        similarity.supervised_contrastive,
    ],
    ("tensorflow", 2): [
        loops.consistency_of_two_inputs,
        similarity.factorization_by_adam,
    ],
}
KINDS = [("horovod", 2), ("horovod", 3), ("tensorflow", 2), ("tensorflow", 3)]


def cases():
    for kind in KINDS:
        for number, script in enumerate(SCRIPTS):
            for feed in feeds_of(script):
                wanted = feeds_of(script)[-1]
                if script in SAMPLE.get(kind, ()) and feed == wanted:
                    marks = ()
                elif (kind, feed) == chosen(number, script):
                    marks = pytest.mark.slow
                else:
                    marks = full_cross
                name = f"{kind[0]}-{kind[1]}-{script.__name__}-{feed}"
                yield pytest.param(kind, script, feed, marks=marks, id=name)


def feeds_of(script) -> list[Feed]:
    """The feeds that a script can take; the last one does not divide, if it may."""
    return [
        feed
        for feed in FEEDS
        if feed.kind in OWN_FEEDS.get(script, [feed.kind])
        and ((feed.rows, feed.batch) == EVEN or script not in DIVISIBLE_ONLY)
    ]


def chosen(number: int, script) -> tuple[tuple[str, int], Feed]:
    """The case of a script in `make test-all`: scripts take engines, ranks and feeds in turn."""
    feeds = feeds_of(script)
    return KINDS[number % len(KINDS)], feeds[number // len(KINDS) % len(feeds)]


@pytest.mark.parametrize(("pool", "script", "feed"), list(cases()), indirect=["pool"])
def test_as_in_one_process(pool, one_process, script, feed):
    check(pool, one_process, script, feed)


def test_every_script_runs():
    """A script that stands in a module and not in its list would be run by nobody."""
    for module in MODULES:
        takes_a_feed = {
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__
            and getattr(value, "__annotations__", {}).get("return") == "Result"
            and value.__code__.co_varnames[:2] == ("strategy", "feed")
            and value.__code__.co_argcount == 2
            and not getattr(value, "__kwdefaults__", None)
            and not value.__code__.co_flags & 0x04
        }
        assert takes_a_feed == set(module.__all__), module.__name__
