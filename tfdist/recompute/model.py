"""Recompute: activations that the backward pass makes again, instead of having them stand.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". A training step keeps what a
region begins with; when the backward pass arrives behind the region, it runs the region's
operations once more. Seeds are read once, so dropout draws the same masks, and what other ranks
sent is kept, so no collective runs twice: gradients are those without, up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.graph.rematerialize import Region
from tfdist.backend.keras.attributes import attention_core
from tfdist.backend.keras.private import all_layers, in_stateless_scope
from tfdist.recompute.policies import POLICIES, check_costs, choose_segments
from tfdist.utils import checks

#: Methods that are an attention layer's core: from queries, keys and values to what they attend to.
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
    """Has training steps recompute activations of a layer or a model, in place.

    ```python
    model = tfdist.recompute.recompute(tfdist.models.gpt(...), "sqrt")
    ```

    Only steps that run as a graph recompute, as all of `fit` are but with `run_eagerly=True`. It is
    no part of what is saved: call it again on a model that was loaded.

    Args:
        target: A layer, which is recomputed as a whole; or a model that is a chain (Sequential or
            functional, see `tfdist.pipeline.chain.Chain`), and for "selective" any layer or model.
        policy: For a model of L parts:
            "every_layer": each part is recomputed, and what it begins with is kept;
            "sqrt": about sqrt(L) runs of parts are;
            "selective": only the core of each attention layer (Korthikanti et al. 2022, "Reducing
            Activation Recomputation in Large Transformer Models");
            "budget": as little time as can be, with at most `budget` bytes of activations;
            "optimal": as few bytes as can be where each part runs at most twice.
        budget: Bytes of activations, for `rows` rows.
        costs: For "budget": "flops", "seconds" (measured), or a number for each part.
        rows: For how many rows "budget" and "optimal" count bytes.
        input_shape: For them, the shape of a row where the model leaves some of it open, as for
            `PipelineModel`.

    Returns:
        `target`.

    Raises:
        ValueError: The policy is unknown or does not fit the target, or no way of recomputing is
            within the budget.
    """
    checks.instance("target", target, keras.layers.Layer, "a Keras layer or model")
    checks.one_of("policy", policy, POLICIES)
    checks.number("budget", budget, above=0, optional=True)
    rows = checks.integer("rows", rows, minimum=1, maximum=1 << 20)
    check_costs(costs)
    if policy == "selective":
        _recompute_cores(target)
    elif not isinstance(target, keras.Model):
        if policy != "every_layer":
            raise ValueError(
                f"policy={policy!r} is for a model of several layers. Received: {target.name!r} of "
                f"type {type(target).__name__}."
            )
        _span(target, target)
    else:
        for first, last in choose_segments(target, policy, budget, costs, rows, input_shape):
            _span(first, last)
    return target


def _recompute_cores(target: keras.layers.Layer) -> None:
    found = False
    for layer in all_layers(target):
        for name in _CORES:
            if hasattr(layer, name):
                found = True
                _wrap(layer, name, begins=True, ends=True)
    if not found:
        raise ValueError(
            "policy='selective' recomputes the core of attention layers, of which "
            f"`{target.name}` has none that is known."
        )


def _span(first: keras.layers.Layer, last: keras.layers.Layer) -> None:
    """Recomputes what runs from the call of one layer to the end of the call of another."""
    if first is last:
        _wrap(first, "call", begins=True, ends=True)
        return
    spot = _Spot()
    _wrap(first, "call", begins=True, ends=False, spot=spot)
    _wrap(last, "call", begins=False, ends=True, spot=spot)


class _Spot:
    """Where a region that is under way is found by what ends it."""

    region: Region | None = None


def _wrap(owner, name: str, *, begins: bool, ends: bool, spot: _Spot | None = None) -> None:
    """Makes a method of an object begin a region, end one, or both."""
    original = getattr(owner, name)
    spot = spot or _Spot()
    anchor = _anchor()

    @functools.wraps(original)
    def call(*args, **kwargs):
        if tf.executing_eagerly() or in_stateless_scope():
            return original(*args, **kwargs)
        if begins:
            args, kwargs, spot.region = _begin(anchor, args, kwargs)
        outputs = original(*args, **kwargs)
        region = spot.region
        if ends and region is not None:
            spot.region = None
            if region.graph is tf.compat.v1.get_default_graph():
                outputs = region.end(outputs)
        return outputs

    setattr(owner, name, call)


def _begin(anchor: tf.Variable, args, kwargs) -> tuple:
    """Arguments that begin a region, and the region."""
    flat = tf.nest.flatten((args, kwargs))
    places = [i for i, x in enumerate(flat) if tf.is_tensor(x) and x.dtype.is_floating]
    made: list[Callable] = []

    @custom_gradient
    def enter(anchor, *tensors):
        def gradient(*upstream):
            made[0]()
            return (tf.zeros_like(anchor), *upstream[1:])

        return (tf.identity(anchor), *[tf.identity(tensor) for tensor in tensors]), gradient

    # A variable that is trained, to the tape: so the backward pass comes by even where nothing
    # before the region has a gradient.
    _, *entered = enter(tf.convert_to_tensor(anchor), *[flat[place] for place in places])
    for place, tensor in zip(places, entered, strict=True):
        flat[place] = tensor
    region = Region()

    def repeat():
        with region.graph.as_default(), tf.control_dependencies(region.arrived):
            begin = {tensor.name: tf.identity(tensor) for tensor in entered}
        region.repeat(region.operations(), begin)

    made.append(repeat)
    args, kwargs = tf.nest.pack_sequence_as((args, kwargs), flat)
    return args, kwargs, region


@functools.cache
def _anchor() -> tf.Variable:
    with tf.init_scope():
        return tf.Variable(0.0, trainable=True, name="recompute_anchor")
