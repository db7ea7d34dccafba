"""Recomputation: the backward pass computes activations again instead of keeping them in memory.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". A training step keeps the inputs of a
region. When the backward pass reaches the end of the region, it runs the region's operations again. Seeds
are read once, so that dropout draws the same masks, and tensors from other ranks are kept, so that no
collective runs twice: gradients are equal to those without recomputation up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.graph.rematerialize import Region
from tfdist.backend.keras.attributes import attention_core
from tfdist.backend.keras.private import all_layers, copy_keras_masks, in_stateless_scope
from tfdist.pipeline.costs import check_costs
from tfdist.recompute.policies import COSTS, POLICIES, choose_runs
from tfdist.utils import checks

#: Methods that compute attention from queries, keys and values.
_CORES = (attention_core.name, "_attend")


def recompute(
    target: keras.layers.Layer,
    policy: str = "every_layer",
    *,
    budget: float | None = None,
    costs: str | Sequence[float] = "flops",
    rows: int = 1,
    input_shape: Sequence | Mapping | None = None,
):
    """Makes training steps recompute activations of a layer or a model, in place.

    ```python
    model = tfdist.recompute.recompute(tfdist.models.gpt(...), "sqrt")
    ```

    Only steps that run as a graph recompute, such as all steps of `fit` without `run_eagerly=True`. The
    setting is not saved with a model: call it again on a model that was loaded.

    Args:
        target: A layer, which is recomputed as a whole; or a model that is a chain (Sequential or
            functional, see `tfdist.pipeline.chain.Chain`); for "selective" any layer or model.
        policy: For a model of L parts:
            "every_layer": recomputes each part, and keeps its inputs;
            "sqrt": recomputes about sqrt(L) runs of parts;
            "selective": recomputes only the core of each attention layer (Korthikanti et al. 2022,
            "Reducing Activation Recomputation in Large Transformer Models");
            "budget": minimizes the time with at most `budget` bytes of activations;
            "optimal": minimizes the bytes while each part runs at most twice.
        budget: Bytes of activations, for `rows` rows.
        costs: For "budget": "flops", "seconds" (measured), or a number for each part.
        rows: For "budget" and "optimal": the number of rows that bytes are counted for.
        input_shape: For "budget" and "optimal": the shape of a row, if the model does not define it
            completely, as for `PipelineModel`.

    Returns:
        `target`.

    Raises:
        ValueError: The policy is unknown or does not fit the target, or no recomputation is within the
            budget.
    """
    checks.instance("target", target, keras.layers.Layer, "a Keras layer or model")
    checks.one_of("policy", policy, POLICIES)
    checks.number("budget", budget, above=0, optional=True)
    rows = checks.integer("rows", rows, minimum=1, maximum=1 << 20)
    check_costs("costs", costs, COSTS)
    if policy == "selective":
        _recompute_cores(target)
    elif not isinstance(target, keras.Model):
        if policy != "every_layer":
            raise ValueError(
                f"policy={policy!r} requires a model of several layers. Received: {target.name!r} of "
                f"type {type(target).__name__}."
            )
        _span(target, target)
    else:
        for first, last in choose_runs(target, policy, budget, costs, rows, input_shape):
            _span(first, last)
    return target


def _recompute_cores(target: keras.layers.Layer) -> None:
    found = [(part, name) for part in all_layers(target) for name in _CORES if hasattr(part, name)]
    if not found:
        raise ValueError(
            "policy='selective' requires attention layers with a known core. Received: "
            f"`{target.name}`, which has none."
        )
    for layer, name in found:
        _wrap(layer, name, _Current(), begins=True, ends=True)


def _span(first: keras.layers.Layer, last: keras.layers.Layer) -> None:
    """Recomputes the operations from the call of one layer to the end of the call of another."""
    current, is_one = _Current(), first is last
    _wrap(first, "call", current, begins=True, ends=is_one)
    if not is_one:
        _wrap(last, "call", current, begins=False, ends=True)


class _Current:
    """The current region, shared by the methods that begin and end it."""

    region: Region | None = None


def _wrap(owner, name: str, current: _Current, *, begins: bool, ends: bool) -> None:
    """Makes a method of an object begin a region, end one, or both."""
    original = getattr(owner, name)
    anchor = _anchor()

    @functools.wraps(original)
    def call(*args, **kwargs):
        if tf.executing_eagerly() or in_stateless_scope():
            return original(*args, **kwargs)
        if begins:
            args, kwargs, current.region = _begin(anchor, args, kwargs)
        outputs = original(*args, **kwargs)
        region = current.region
        if ends and region is not None:
            current.region = None
            if region.graph is tf.compat.v1.get_default_graph():
                ended = region.end(outputs)
                copy_keras_masks(outputs, ended)
                return ended
        return outputs

    setattr(owner, name, call)


def _begin(anchor: tf.Variable, args, kwargs) -> tuple:
    """The arguments at the beginning of a region, and the region."""
    flat = tf.nest.flatten((args, kwargs))
    places = [i for i, x in enumerate(flat) if tf.is_tensor(x) and x.dtype.is_floating]

    @custom_gradient
    def enter(anchor, *tensors):
        def gradient(*upstream):
            repeat()
            return (tf.zeros_like(anchor), *upstream[1:])

        return (tf.identity(anchor), *[tf.identity(tensor) for tensor in tensors]), gradient

    # A trained variable for the tape, so that the backward pass reaches the region even if nothing before
    # it has a gradient.
    _, *entered = enter(tf.convert_to_tensor(anchor), *[flat[place] for place in places])
    copy_keras_masks([flat[place] for place in places], entered)
    for place, tensor in zip(places, entered, strict=True):
        flat[place] = tensor
    region = Region()

    def repeat():
        with region.graph.as_default(), tf.control_dependencies(region.arrived):
            begin = {tensor.name: tf.identity(tensor) for tensor in entered}
        region.repeat(region.operations(), begin)

    args, kwargs = tf.nest.pack_sequence_as((args, kwargs), flat)
    return args, kwargs, region


@functools.cache
def _anchor() -> tf.Variable:
    with tf.init_scope():
        return tf.Variable(0.0, trainable=True, name="recompute_anchor")
