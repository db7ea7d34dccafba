"""Checks that ranks are in sync: checksums of all values of which there are several copies."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tfdist.addons.monitoring.rerun import RecordedSteps, State
from tfdist.backend.keras.attributes import accumulators, stored_value
from tfdist.collectives.objects import all_gather_object
from tfdist.runtime import exit_codes, uncaught
from tfdist.sharding.layout import layout_of, replicated_variables, variables_of
from tfdist.sharding.states import layer_states
from tfdist.step.context import strategy_of
from tfdist.step.hooks import FitContext, FitHook
from tfdist.step.local_steps import all_optimizers, local_optimizer
from tfdist.utils import checks
from tfdist.utils.errors import TfdistError
from tfdist.watchdog.report import format_ranks

_logger = logging.getLogger("tfdist")
_LISTED = 5


class ModelSyncError(TfdistError, RuntimeError):
    """Values that must be identical on several ranks differ.

    Attributes:
        is_transient: Whether the same steps succeeded when they were run again; None where they were
            not run again.
        ranks: The ranks whose values differ from those of the others; of two ranks it may be both.
        exit_code: The exit code of a rank that does not catch this error.
    """

    def __init__(
        self,
        message: str,
        is_transient: bool | None = None,
        ranks: tuple[int, ...] = (),
        exit_code: int = exit_codes.FAILED,
    ):
        super().__init__(message)
        self.is_transient, self.ranks, self.exit_code = is_transient, ranks, exit_code

    def __reduce__(self):
        return type(self), (*self.args, self.is_transient, self.ranks, self.exit_code)


@dataclasses.dataclass(frozen=True)
class _Difference:
    """A variable whose value differs on some ranks.

    Attributes:
        name: Its path.
        ranks: The ranks whose values must be identical.
        sums: The checksum of each rank.
    """

    name: str
    ranks: tuple[int, ...]
    sums: tuple[int, ...]

    def odd(self, right: int | None = None) -> tuple[int, ...]:
        """The ranks whose value differs from most, or from the `right` one; () if unknown."""
        if right is None or right not in self.sums:
            (right, number), *_ = collections.Counter(self.sums).most_common(1)
            if 2 * number <= len(self.ranks):
                return ()
        return tuple(r for r, s in zip(self.ranks, self.sums, strict=True) if s != right)

    def words(self, odd: tuple[int, ...]) -> str:
        """A description, with the ranks that are known to be wrong."""
        if odd:
            return f"`{self.name}` has a different value on {format_ranks(odd)}"
        return f"`{self.name}` differs between {format_ranks(self.ranks)}"


#: The checksum of each rank, by group of ranks and path of a variable.
_Sums = dict[tuple[tuple[int, ...], str], tuple[int, ...]]


def verify_model_sync(model: keras.Model) -> None:
    """Compares the copies of a model and its optimizer on several ranks; it is a collective.

    Whole variables are the same on all ranks of the data and the tensor axis, slices of split ones
    along the data axis, and flat shards of ZeRO along the axes over which they are not sharded, such as
    those of whole variables along the tensor axis. A shard without a second copy is not compared, nor
    are the moving averages that layers compute from the batches of their rank, and the gradients that a rank
    accumulates below ZeRO stage 2. With an optimizer of
    `tfdist.addons.slow_links.local_sgd` the parameters of the last sync and the outer optimizer's state are
    compared; right after a sync the ranks' own parameters, too.

    Args:
        model: A built model, under a strategy of tfdist.

    Raises:
        ModelSyncError: On all ranks, with the variables that differ, and the ranks whose values differ
            from most.
    """
    checks.instance("model", model, keras.Model, "a Keras model")
    strategy = strategy_of(model)
    if strategy is None or strategy.mesh.size == 1:
        return
    found = _differences(_checksums(model))
    if found:
        odd = [(each, each.odd()) for each in found]
        raise ModelSyncError(f"Ranks are not in sync: {_said(odd)}.", ranks=_ranks_of(odd))


def _checksums(model: keras.Model, state: State | None = None) -> _Sums:
    """Checksums of values that must be identical; a collective with the same result on all ranks.

    Args:
        model: The model.
        state: Values to use in place of the current ones of variables.
    """
    strategy: Any = strategy_of(model)
    mesh = strategy.mesh
    own: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    local = {id(variable) for variable in layer_states(model)}
    if strategy.zero_stage < 2:
        for optimizer in all_optimizers(model):
            local |= {id(each) for each in accumulators(optimizer, ())}
    apart = local_optimizer(model)
    compared = replicated_variables(model)
    compared += [
        (variable, layout_of(variable).replicated_axes(mesh))
        for variable in variables_of(model)
        if layout_of(variable).flat is not None
    ]
    if apart is not None and not apart.is_apart:
        trained = [variable for variable, _ in apart.global_variables]
        compared += [
            (variable, layout_of(variable).replicated_axes(mesh, after_sync=True))
            for variable in trained
        ]
    for variable, axes in compared:
        if id(variable) in local or not axes:
            continue
        ranks = tuple(strategy.group(*axes).ranks)
        if len(ranks) > 1:
            value = None if state is None else state.get(id(variable))
            data = np.ascontiguousarray(stored_value(variable).numpy() if value is None else value)
            checksum = zlib.crc32(data.view(np.uint8).ravel().data)
            own.setdefault(ranks, []).append((variable.path, checksum))
    found = all_gather_object(own, strategy.group(), name="model-sync")
    sums: _Sums = {}
    for ranks in sorted({group for each in found for group in each}):
        for place, (path, _) in enumerate(found[ranks[0]][ranks]):
            every = tuple(found[rank][ranks][place][1] for rank in ranks)
            # Variables of several optimizers may have the same path.
            name = path if (ranks, path) not in sums else f"{path} ({place})"
            sums[ranks, name] = every
    return sums


def _differences(sums: _Sums) -> list[_Difference]:
    return [
        _Difference(name, ranks, every)
        for (ranks, name), every in sums.items()
        if len(set(every)) > 1
    ]


def _said(odd: list[tuple[_Difference, tuple[int, ...]]]) -> str:
    # A difference on the fewest ranks is closest to its origin.
    odd = sorted(odd, key=lambda each: len(each[1]) or len(each[0].ranks))
    more = f" and {len(odd) - _LISTED} more" if len(odd) > _LISTED else ""
    return "; ".join(each.words(ranks) for each, ranks in odd[:_LISTED]) + more


def _ranks_of(odd: list[tuple[_Difference, tuple[int, ...]]]) -> tuple[int, ...]:
    known = {rank for _, ranks in odd for rank in ranks}
    return tuple(sorted(known or {rank for each, _ in odd for rank in each.ranks}))


class VerifyModelSync(keras.callbacks.Callback, FitHook):
    """Checks at intervals whether ranks are in sync, to detect silent errors.

    If they are not, the steps since the last check are run again, from the state on which all ranks
    agreed. If ranks agree then, the fault was transient (a flipped bit): a warning names the variable
    and the rank, and training continues from the second run. If they differ again it is persistent (a
    broken machine, or a program that behaves differently on some ranks), and the job ends. This follows
    the rerun state machine of Megatron-LM and its exit codes.

    A rank with a fault ends with exit code 77 (transient) or 78 (persistent), the others with 75; of
    two ranks that differ persistently both end with 78.

    Args:
        every_steps: The number of training steps between two checks. Reading and comparing takes about
            a second per gigabyte.
        rerun: Whether steps are run again. The state of the last check is kept in the host's memory,
            as large as the model and its optimizer on a rank (twice as large during a check), and
            so are the batches since. Callbacks may then change weights only between epochs. With
            `steps_per_execution`, with optimizers of `tfdist.addons.slow_links.local_sgd`, and with False, a
            difference is raised at once.
        on_transient: "continue", or "end" to end the job on a transient fault, too.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range.
    """

    # It acts at the beginning of a step.
    async_safe = True

    def __init__(
        self, every_steps: int = 100, *, rerun: bool = True, on_transient: str = "continue"
    ):
        super().__init__()
        self._every_steps = checks.integer("every_steps", every_steps, minimum=1)
        self._reruns = checks.boolean("rerun", rerun)
        checks.one_of("on_transient", on_transient, ("continue", "end"))
        self._ends_on_transient = on_transient == "end"
        self._begun = self._batch = 0
        self._recorded: RecordedSteps | None = None

    def on_train_begin(self, logs=None):
        """Resets the callback."""
        uncaught.tell_in_one_line(ModelSyncError, lambda error: error.exit_code)
        self._begun = self._batch = 0
        self._recorded = None

    def on_train_batch_begin(self, batch, logs=None):
        """Compares at intervals, if steps are not run again."""
        if self._can_rerun():
            # Not at the beginning of training, where other callbacks change the training function.
            if self.model.train_function != self._step:
                self._recorded = RecordedSteps(self.model, self.model.train_function)
                self.model.train_function = self._step
        elif self._begun and self._begun % self._every_steps == 0:
            verify_model_sync(self.model)
        self._begun += 1
        self._batch = batch

    def on_test_begin(self, logs=None):
        """Compares the remaining steps of an epoch before metrics are reset."""
        self._look()

    def on_epoch_end(self, epoch, logs=None):
        """Compares the remaining steps of an epoch: callbacks may change variables now."""
        self._look()
        if self._recorded is not None:
            self._recorded.begin(None)

    def on_train_end(self, logs=None):
        """Compares a last time."""
        if self._recorded is None:
            verify_model_sync(self.model)
        self._let_go()

    @contextlib.contextmanager
    def around(self, fit: FitContext) -> Iterator[None]:
        """See `FitHook.around`."""
        try:
            yield
        finally:
            if fit.kind == "fit":
                self._let_go()

    def _let_go(self) -> None:
        if self._recorded is not None and self.model.train_function == self._step:
            self.model.train_function = self._recorded.function
        self._recorded = None

    def _can_rerun(self) -> bool:
        model = self.model
        strategy = strategy_of(model)
        return (
            self._reruns
            and strategy is not None
            and strategy.mesh.size > 1
            and model.steps_per_execution == 1
            and local_optimizer(model) is None
        )

    def _step(self, iterator):
        """Replaces the model's training function."""
        recorded = self._recorded
        if recorded is None:
            raise RuntimeError("The training function cannot be called after its `fit` has ended.")
        if not recorded.has_begun:
            state = recorded.state()
            found = _differences(_checksums(self.model, state))
            if found:
                odd = [(each, each.odd()) for each in found]
                raise ModelSyncError(
                    f"Ranks are not in sync between two epochs: {_said(odd)}.", ranks=_ranks_of(odd)
                )
            recorded.begin(state)
        logs = recorded.run(iterator)
        # Callbacks may change variables at the end of an epoch.
        is_last = self._batch + 1 == (self.params or {}).get("steps")
        if is_last or len(recorded) == self._every_steps:
            return self._look(logs)
        return logs

    def _look(self, logs=None):
        """Compares; if ranks are not in sync, runs the steps again. Returns the logs of the valid run."""
        recorded = self._recorded
        if recorded is None or not len(recorded):
            return logs
        state = recorded.state()
        found = _differences(_checksums(self.model, state))
        if found:
            del state
            logs = recorded.again()
            state = recorded.state()
            self._judge(found, _checksums(self.model, state))
        recorded.begin(state)
        return logs

    def _judge(self, found: list[_Difference], second: _Sums) -> None:
        again = _differences(second)
        steps = f"the {len(self._recorded or ())} steps up to step {self._begun}"
        if again:
            odd = [(each, each.odd()) for each in again]
            raise self._error(
                f"Ranks are not in sync: {_said(odd)}. The fault is persistent: {steps} were run "
                "again from the same state, and ranks differ again. Exclude the rank's machine "
                "(`tfdist-run --exclude_after`), or find what the program does on one rank only.",
                False,
                odd,
            )
        # The second run shows which of two values was right.
        odd = [(each, each.odd(second[each.ranks, each.name][0])) for each in found]
        said = (
            f"Ranks were not in sync: {_said(odd)}. The fault was transient: {steps} were run again "
            "from the same state, and ranks agree."
        )
        if self._ends_on_transient:
            raise self._error(said, True, odd)
        if _rank_in(self.model) == 0:
            _logger.warning("%s Training continues from there.", said)

    def _error(self, said: str, is_transient: bool, odd) -> ModelSyncError:
        ranks = _ranks_of(odd)
        own = exit_codes.TRANSIENT_FAULT if is_transient else exit_codes.PERSISTENT_FAULT
        code = own if _rank_in(self.model) in ranks else exit_codes.ENDED_BY_WATCHDOG
        return ModelSyncError(said, is_transient, ranks, code)


def _rank_in(model: keras.Model) -> int:
    strategy = strategy_of(model)
    return 0 if strategy is None else strategy.mesh.rank
