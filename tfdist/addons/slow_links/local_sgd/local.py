"""The common base of local SGD, SlowMo and DiLoCo: local steps, and a sync every `sync_every` steps.

Each rank of the data axis has parameters x_i, and all have the same global parameters x, those of the
last sync. A step updates x_i by the rank's own gradient and its own state of the inner optimizer. At a
sync the pseudo-gradients x - x_i are averaged, an outer step makes new global parameters of x and the
average d, and all ranks continue from these:

    d = mean over ranks of (x - x_i)        global minus local: it points uphill, as a gradient does
    x = outer step of (x, d)
    x_i = x
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.addons.slow_links.local_sgd.arguments import check_layouts, checked_inner
from tfdist.addons.slow_links.local_sgd.frames import ShowGlobal, ShowOwn
from tfdist.addons.slow_links.local_sgd.hosts import ranks_in_step
from tfdist.addons.slow_links.local_sgd.local_state import LocalState, value_of, when
from tfdist.backend.clock.stamps import updating
from tfdist.backend.keras.attributes import own_variables
from tfdist.collectives.engine import Engine
from tfdist.gradients.norms import square_of
from tfdist.gradients.reduce import reduce_gradients
from tfdist.mesh import Mesh
from tfdist.sharding.layout import update_layout
from tfdist.sharding.states import average_states, layer_states
from tfdist.step.context import current_replica, current_strategy
from tfdist.step.hooks import FitContext, FitHook
from tfdist.step.local_steps import LocalSteps, local_optimizer
from tfdist.utils import checks


class LocalOptimizer(keras.optimizers.Optimizer, LocalSteps, FitHook):
    """The base of `LocalSGD`, `SlowMo` and `DiLoCo`.

    Args:
        inner: The optimizer of the local steps, or its name.
        sync_every: The number of steps from one sync to the next.
        within: The ranks that still reduce gradients at every step, and train as one: None for only
            those that share a model (over the tensor, pipeline, expert and context axes), "host" for
            all whose models are on the same hosts, or the name of a custom axis.
        name: The optimizer's name.

    Raises:
        TypeError: `inner` is not an optimizer.
        ValueError: An argument is out of range, or `inner` is not supported.
    """

    def __init__(
        self,
        inner: keras.optimizers.Optimizer | str,
        sync_every: int,
        *,
        within: str | None = None,
        name: str | None = None,
    ):
        inner = checked_inner(inner)
        checks.integer("sync_every", sync_every, minimum=1)
        checks.text("within", within, optional=True)
        if within is not None and not within.isidentifier():
            raise checks.refuse("within", within, "None, 'host' or the name of a mesh axis")
        checks.text("name", name, optional=True)
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner
        self.sync_every, self.within = int(sync_every), within
        self._held = LocalState()

    # -- for subclasses -----------------------------------------------------------------------------

    #: Whether an outer step is elementwise, so that it can be that of a slice.
    elementwise = True
    #: The names of the outer optimizer's variables, one for each parameter.
    outer_slots: tuple[str, ...] = ()

    @abc.abstractmethod
    def outer_step(self, values, delta, slots: Sequence, shared: Sequence):
        """New global parameters.

        Args:
            values: The global parameters of the last sync: a tensor.
            delta: The average over ranks of the global minus the local parameters.
            slots: The outer optimizer's variables for it, which this method updates.
            shared: The means over ranks of the scalars of `shared_scalars`.
        """

    def shared_scalars(self) -> list:
        """Scalars of this rank whose mean over ranks an outer step needs."""
        return []

    # -- variables ----------------------------------------------------------------------------------

    def build(self, variables) -> None:
        """Makes the inner optimizer's variables, the global parameters and the outer state."""
        if self.built:
            return
        variables = list(variables)
        self._held.strategy = strategy = current_strategy()
        if strategy is not None:
            check_layouts(strategy, variables)
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        self._held.steps = self.add_variable(
            shape=(), dtype="int64", initializer="zeros", name="local_steps"
        )
        for slot in ("global", *self.outer_slots, *self.own_slots()):
            self._held.slots[slot] = [
                self.add_variable_from_reference(variable, name=slot) for variable in variables
            ]
        super().build(variables)
        self._held.trained = variables
        self.mark_local([*variables, *self.inner_optimizer.variables])
        self.mark_local([v for slot in self.own_slots() for v in self._held.slots[slot]])

    def own_slots(self) -> tuple[str, ...]:
        """Names of slots whose values belong to this rank only."""
        return ()

    def mark_local(self, variables: Sequence) -> None:
        """Marks other variables, such as those of a loss scale, as local to this rank."""
        strategy = self._held.strategy
        axes = Mesh().replica_axes if strategy is None else strategy.mesh.replica_axes
        for variable in variables:
            update_layout(variable, local_over=axes)

    @property
    def variables(self) -> list:
        """The outer optimizer's variables, and the inner one's."""
        return own_variables(self) + self.inner_optimizer.variables

    @property
    def global_variables(self) -> list[tuple[Any, Any]]:
        """Each trained variable with that of its global parameters, once they are created."""
        return list(zip(self._held.trained, self._held.slots.get("global", ()), strict=True))

    # -- steps --------------------------------------------------------------------------------------

    def in_step(self, engine: Engine) -> frozenset[int]:
        """See `LocalSteps`."""
        if self._held.ranks is None or self._held.ranks[0] is not engine:
            self._held.ranks = engine, ranks_in_step(engine, self.within)
        return self._held.ranks[1]

    @property
    def is_apart(self) -> bool:
        """Whether ranks have made steps since the last sync. Eager only."""
        return self.built and int(self._held.steps) > 0

    def begin_scaled_step(self) -> None:
        """See `LocalSteps`."""
        self._held.is_scaled = True
        self.note_parameters()
        self._at_end(self.end_step)

    def _at_end(self, function: Callable[[], None]) -> None:
        """Calls a function when this rank's step is over, or now outside of a replica's step."""
        replica = current_replica()
        if replica is None:
            function()
        else:
            replica.at_end.append(function)

    def apply(self, grads, trainable_variables=None) -> None:
        """Applies a local step, and a sync if one is due.

        Args:
            grads: This rank's gradients, in the order of the variables.
            trainable_variables: The variables; by default those with which it was built.

        Raises:
            ValueError: The variables are required and missing, or the model does not track the optimizer.
        """
        grads = list(grads)
        if not grads:
            return
        if not self.built:
            self.build(self._given(trainable_variables))
        with updating(grads, square_of):
            self._step(grads, trainable_variables)

    def _step(self, grads: list, trainable_variables) -> None:
        if self._held.is_scaled:
            self._apply_inner(grads, trainable_variables)
            return
        self.note_parameters()
        self._apply_inner(grads, trainable_variables)
        replica = current_replica()
        if replica is None or replica.step is None:
            self.end_step()
        else:
            # Layer states of rows without samples are restored before.
            self._at_end(self.end_step)

    def _given(self, trainable_variables) -> list:
        if trainable_variables is None:
            raise ValueError(
                "`trainable_variables` is required for an optimizer that is not built. Use "
                "`optimizer.apply(gradients, variables)`."
            )
        return list(trainable_variables)

    def _apply_inner(self, grads: list, trainable_variables) -> None:
        replica = current_replica()
        if replica is None:
            self.inner_optimizer.apply(grads, trainable_variables)
            return
        ranks = self.in_step(replica.strategy.engine)
        step = replica.step
        if step is not None and step.in_step != ranks:
            raise ValueError(
                "A model must hold its optimizers as attributes, because its losses depend on the ranks "
                f"with which they step. Received: `{step.model.name}`, which does not hold "
                f"`{self.name}`."
            )
        before, replica.in_step = replica.in_step, ranks
        try:
            has_samples = None if step is None else step.has_samples
            if has_samples is None:
                self.inner_optimizer.apply(grads, trainable_variables)
            else:
                when(has_samples, lambda: self.inner_optimizer.apply(grads, trainable_variables))
        finally:
            replica.in_step = before

    def note_parameters(self) -> None:
        """See `LocalSteps`."""
        self._held.strategy = current_strategy() or self._held.strategy

        def note():
            for variable, kept in self.global_variables:
                kept.assign(variable)

        when(tf.equal(self._held.steps.value, 0), note)

    def count_step(self) -> None:
        """Counts a step."""
        self._held.steps.assign_add(1)

    @property
    def steps_since_start(self) -> tf.Tensor:
        """The steps since the last sync; with fragments, since the last sync of all together."""
        return tf.convert_to_tensor(self._held.steps.value)

    def slot(self, name: str, place: int):
        """The variable of a slot for a parameter."""
        return self._held.slots[name][place]

    def end_step(self) -> None:
        """Counts the step, and synchronizes if a sync is due."""
        self.count_step()
        when(tf.equal(self._held.steps.value, self.sync_every), self._sync)

    def synchronize(self) -> None:
        """Synchronizes ranks now, if they have made local steps; all ranks call this. Eager only.

        `fit` calls it at the end.
        """
        if self.is_apart:
            self._sync()

    def restart(self) -> None:
        """See `LocalSteps`. Eager only."""
        self._held.is_resumed = False
        if self.is_apart:
            for variable, kept in self.global_variables:
                variable.assign(kept)
        if self.built:
            self._held.steps.assign(0)

    @property
    def is_resumed(self) -> bool:
        """See `LocalSteps`."""
        return self._held.is_resumed

    def resume(self, *, own: bool) -> None:
        """See `LocalSteps`. Eager only."""
        if own:
            self._held.is_resumed = True
            return
        for variable, kept in self.global_variables:
            variable.assign(kept)
        self.restart()

    @contextlib.contextmanager
    def global_parameters(self) -> Iterator[None]:
        """See `LocalSteps`."""
        if not self.is_apart or self._held.shows_global:
            yield
            return
        pairs = self.global_variables
        own = [tf.identity(value_of(variable)) for variable, _ in pairs]
        self._held.shows_global = True
        try:
            for variable, kept in pairs:
                variable.assign(kept)
            yield
        finally:
            self._held.shows_global = False
            for (variable, _), value in zip(pairs, own, strict=True):
                variable.assign(value)

    @contextlib.contextmanager
    def around(self, fit: FitContext) -> Iterator[None]:
        """See `FitHook`: `fit` begins from the global parameters, and other calls use them."""
        local_optimizer(fit.model)
        if fit.kind != "fit":
            with self.global_parameters():
                yield
            return
        self.restart()
        first = ShowGlobal(self)
        with first.shown:
            fit.arguments["callbacks"] = [first, *fit.callbacks, ShowOwn(first)]
            yield

    # -- syncs --------------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Averages pseudo-gradients, and applies an outer step."""
        places = range(len(self._held.trained))
        means, shared = self.averaged(self.deltas(places))
        self.outer(places, means, shared)
        self.average_layer_states()
        self._held.steps.assign(0)

    def deltas(self, places: Sequence[int]) -> list:
        """This rank's pseudo-gradients, global minus local, of some parameters."""
        pairs = self.global_variables
        return [value_of(pairs[place][1]) - value_of(pairs[place][0]) for place in places]

    def averaged(self, deltas: Sequence) -> tuple[list, list]:
        """The means over ranks of pseudo-gradients, and of `shared_scalars`."""
        own = [*deltas, *self.shared_scalars()]
        strategy = self._held.strategy
        if strategy is not None:
            group = strategy.group(*strategy.mesh.replica_axes)
            own = reduce_gradients(own, group, "mean", strategy.gradient_options, name="local-sgd")
        return own[: len(deltas)], own[len(deltas) :]

    def outer(
        self,
        places: Sequence[int],
        means: Sequence,
        shared: Sequence,
        local: Callable = lambda own, new: new,
    ) -> None:
        """Applies an outer step to some parameters. Ranks continue from `local(own, result)`."""
        pairs = self.global_variables
        for place, delta in zip(places, means, strict=True):
            variable, kept = pairs[place]
            slots = [self._held.slots[name][place] for name in self.outer_slots]
            if getattr(variable, "overwrite_with_gradient", False):
                # A scale that its layer sets, as in float8, has no gradient to descend.
                new = value_of(kept) - delta
            else:
                new = self.outer_step(value_of(kept), delta, slots, shared)
            if variable.constraint is not None:
                new = variable.constraint(new)
            kept.assign(new)
            variable.assign(local(value_of(variable), new))

    def average_layer_states(self) -> None:
        """Averages the states that layers compute from their rows, in a step of a Keras model."""
        replica = current_replica()
        if replica is not None and replica.step is not None:
            states = layer_states(replica.step.model)
            average_states(states, replica.strategy.gradient_group)

    # -- Keras --------------------------------------------------------------------------------------

    @property
    def learning_rate(self):
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate):
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self):
        """The inner optimizer's iterations: the steps that this rank has made."""
        return self.inner_optimizer.iterations

    def scale_loss(self, loss):
        """Scales the loss as the inner optimizer does."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list) -> None:
        """Called by `fit` at the end: synchronizes ranks."""
        self.synchronize()
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {
            "name": self.name,
            "inner": keras.saving.serialize_keras_object(self.inner_optimizer),
            "sync_every": self.sync_every,
            "within": self.within,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Makes an optimizer from the result of `get_config`."""
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(
            config.pop("inner"), custom_objects=custom_objects
        )
        return cls(inner, **config)
