"""Every public argument with every bad value: one line that names the argument and shows the value."""

import collections
import dataclasses
import time

import pytest

from tests.values.bad_values import EVERY
from tests.values.signatures import LEGAL, Case, cases, public_callables
from tfdist.checkpoint.errors import StorageError
from tfdist.utils.checks import shown

pytestmark = pytest.mark.usefixtures("no_old_garbage")

#: There is no checkpoint, or no file, of that name.
_MISSING = (StorageError, FileNotFoundError, IsADirectoryError)
#: Of this process's time, for one call.
_MOST_SECONDS = 2.0
#: Calls that ask the network about a value that may be right.
_NOT_CALLED = ("tfdist.strategies.tpu",)


@dataclasses.dataclass(frozen=True)
class Outcome:
    case: Case
    error: BaseException | None
    seconds: float


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[Outcome]:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        at = None
        for case in cases():
            if case.callable != at:  # Some paths are right, and are written to.
                at = case.callable
                patch.chdir(tmp_path_factory.mktemp("values"))
            if case.is_legal and case.callable in _NOT_CALLED:
                continue
            begin, error = time.process_time(), None
            try:
                case.call()
            except BaseException as caught:
                error = caught
            found.append(Outcome(case, error, time.process_time() - begin))
    return found


def _wrong_with(outcome: Outcome) -> str:
    """What is wrong with the answer to a bad value, or ""."""
    case, error = outcome.case, outcome.error
    if outcome.seconds > _MOST_SECONDS:
        return f"it took {outcome.seconds:.1f} s"
    if error is None:
        return "" if case.is_legal else "it is taken"
    if case.is_legal and isinstance(error, _MISSING):
        return ""
    text = str(error)
    if not isinstance(error, ValueError | TypeError):
        return f"{type(error).__name__}: {text}"
    if "\n" in text or case.argument not in text or shown(case.value) not in text:
        return f"the message is {text!r}"
    return ""


@pytest.mark.parametrize("name", public_callables())
def test_bad_values_are_refused_by_name(outcomes, name):
    wrong = [
        f"{outcome.case.argument}={shown(outcome.case.value)}: {what}"
        for outcome in outcomes
        if outcome.case.callable == name and (what := _wrong_with(outcome))
    ]
    assert not wrong, "\n".join(wrong)


def test_at_least_a_thousand_values_are_refused(outcomes):
    refused = collections.Counter(
        outcome.case.callable.rsplit(".", 1)[0] for outcome in outcomes if outcome.error is not None
    )
    print(dict(refused))
    assert refused.total() >= 1000, refused


def test_what_is_listed_as_legal_is_taken_somewhere(outcomes):
    taken = {
        (pattern, outcome.case.value_name)
        for outcome in outcomes
        if outcome.error is None or isinstance(outcome.error, _MISSING)
        for pattern in outcome.case.legal_by()
    }
    for pattern, names in LEGAL.items():
        for name in EVERY if "*" in names else names:
            assert (pattern, name) in taken, f"{pattern}: {name} is refused, or never tried"


def test_a_new_argument_is_tried_by_itself(monkeypatch):
    def function(number: int = 3, *, mode: str = "a", options: dict | None = None):
        raise NotImplementedError

    function.__module__ = "tfdist.pipeline"
    monkeypatch.setattr("tfdist.pipeline.new", function, raising=False)
    monkeypatch.setattr("tfdist.pipeline.__all__", ["new"])
    new = [case for case in cases() if case.callable == "tfdist.pipeline.new"]
    assert {case.argument for case in new} == {"number", "mode", "options"}
    assert all(len([c for c in new if c.argument == name]) > 20 for name in ("number", "mode"))
