"""`parallelize`: splits any Keras model over the tensor axis by a plan, and experts over theirs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.backend.keras.functional import is_deferred
from tfdist.backend.keras.private import all_layers
from tfdist.collectives import Group, broadcast
from tfdist.sharding.experts import expert_group
from tfdist.sharding.layout import layout_of
from tfdist.sharding.parts import deep_copy
from tfdist.sharding.split import split_of
from tfdist.sharding.weights import tensor_group
from tfdist.tensor_parallel.adapters import Adapter
from tfdist.tensor_parallel.attributes import made_under, variables_of_layer
from tfdist.tensor_parallel.blocks import Block, split_blocks
from tfdist.tensor_parallel.check import Check
from tfdist.tensor_parallel.choosing import adapter_class
from tfdist.tensor_parallel.experts import find_experts, spread_experts
from tfdist.tensor_parallel.finding import find_plan
from tfdist.tensor_parallel.layout_map import is_layout_map, plan_of_layout_map
from tfdist.tensor_parallel.one_pass import normalize_in_one_pass
from tfdist.tensor_parallel.plan import kinds_of
from tfdist.tensor_parallel.prefill import drop_logits_of_prefill
from tfdist.tensor_parallel.registered import parts_of_registered
from tfdist.tensor_parallel.report import ParallelizeReport, VariableReport
from tfdist.utils import checks


def parallelize(
    model: keras.Model, plan: Mapping[str, str] | Any | None = None, *, sample=None
) -> keras.Model:
    """Splits a model's Dense, Embedding and attention layers over the tensor axis, in place.

    ```python
    with strategy.scope():
        model = keras_hub.models.Llama3CausalLM.from_preset("llama3-local/")
        model.backbone.enable_lora(8)
        model = parallelize(model)
        print(report(model))
    ```

    Without a plan, one is found: attention by heads, feed-forward blocks, tables of tokens.

    To Keras the model stays the same: the same objects, paths and configuration. It trains,
    evaluates and predicts as on one device, and files saved from it can be loaded there with plain
    Keras. Each split variable starts from the slice of its value on the first rank.

    A plan maps patterns of the variables' paths to words:

    - "column": a rank computes its share of the layer's units or heads, from the whole input. The
      output stays split, for a "row" layer.
    - "row": a rank uses its share of the inputs, and the ranks' products are summed.
    - "vocabulary": for an Embedding, each rank has a range of ids. For a Dense, each rank computes its
      range of the units, and the ranges are joined; with `VocabParallelCrossEntropy` and in a model's
      last layer they stay split. The size need not be divisible by the tensor axis.
    - "replicate": the variable stays whole, as do those that no pattern matches.
    - The kinds of a split that is registered for the layer's class
      (`tfdist.extend.register_split`): the split determines all weights of the layer.

    A pattern that matches a kernel determines its layer: the bias follows. After splitting, the
    model is run on a sample, and its outputs and the gradients of its weights are compared with those
    before, so a wrong plan raises an error instead of training to a bad loss. Until then each rank has
    the whole model, and during the comparison its gradients too. A model whose weights are deferred
    (`tfdist.pipeline.deferred_weights`) has no values to compare.

    The experts of KerasHub's models (Mixtral, Qwen-MoE, Qwen3-MoE, Qwen3.5-MoE, GPT-OSS, Gemma 4) are
    computed sparsely then: only the chosen experts of each token, while KerasHub computes all. This
    applies to a single rank too; with an expert axis each of its ranks has a part of the experts. Plans
    do not include them.

    Layers with LoRA, or quantized to int8 or int4, are split with the additional variables.
    `enable_lora` and `quantize` work on a split layer too; then every rank must call them.

    Without a strategy in scope, or with a tensor axis of 1, the plan is checked and nothing
    changes but experts. A model that is split already is not split again without a plan.

    Args:
        model: A built model whose optimizer has not been built.
        plan: A dict from regular expressions of whole variable paths (`re.fullmatch`) to these words; or
            a `keras.distribution.LayoutMap`, such as KerasHub's `get_layout_map` returns, whose data
            axis means ZeRO stage 3. None: a plan is found.
        sample: An argument of `model(sample)` for the comparison; the same on every rank. It builds a
            model that is not built. A functional model needs none.

    Returns:
        The model. `report(model)` describes the split of each variable.

    Raises:
        ValueError: No plan is found, a pattern matches nothing, two match one variable, a layer
            cannot be split, a size is not divisible by the axis, the split model computes different
            results, or the model is not built, split already or in training. The model is then not
            changed.
    """
    checks.instance("model", model, keras.Model, "a Keras model")
    group = tensor_group()
    _check_scope(model)
    if not model.built and sample is not None:
        _build(model, sample)
    _check_state(model)
    if plan is None and any(layout_of(variable).slice for variable in model.weights):
        return model
    deferred = any(is_deferred(variable) for variable in model.weights)
    weights = list(model.weights)
    experts = find_experts(model)
    for bank in experts:
        bank.check(expert_group())
    found = _plan(model, plan)
    kinds = kinds_of(found, [weight.path for weight in weights])
    adapters = _adapters(model, kinds)
    by_layer = {id(adapter.layer): adapter for adapter in adapters}
    blocks = list(split_blocks(all_layers(model), by_layer))
    if group is not None and adapters:
        for adapter in adapters:
            adapter.check(group)
        for block in blocks:
            block.check(group)
        if deferred:
            with _all_or_nothing(model):
                _apply(adapters, blocks, group)
            for block in blocks:
                block.mark_inside(group)
        else:
            _start_alike(model, group)
            with _constants_moved(model), _all_or_nothing(model):
                check = Check(model, sample, group)
                _apply(adapters, blocks, group)
                check.compare([adapter.layer for adapter in adapters])
                for adapter in adapters:
                    adapter.check_compared()
        drop_logits_of_prefill(model)
        normalize_in_one_pass(model)
    with _all_or_nothing(model):
        spread_experts(experts)
    if experts or (group is not None and adapters):
        _forget_traces(model)
    _reports[model] = _report(weights, kinds, adapters, group)
    return model


#: The report of `parallelize` for each model.
_reports: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def report(model: keras.Model) -> ParallelizeReport:
    """The split of each variable of a model by `parallelize`; `print` shows a table.

    Raises:
        ValueError: The model was not given to `parallelize`.
    """
    checks.instance("model", model, keras.Model, "a Keras model")
    if model not in _reports:
        raise ValueError(
            f"A report requires a model that was passed to `parallelize`. Received: `{model.name}`."
        )
    return _reports[model]


def _plan(model: keras.Model, plan) -> Mapping[str, str]:
    if plan is None:
        return find_plan(model)
    return plan_of_layout_map(model, plan) if is_layout_map(plan) else plan


def _apply(adapters: Sequence[Adapter], blocks: Sequence[Block], group: Group) -> None:
    for adapter in adapters:
        adapter.apply(group)
    for block in blocks:
        block.apply(group)


def _check_scope(model: keras.Model) -> None:
    own = made_under(model)
    current = tf.distribute.get_strategy()
    ours = [strategy for strategy in (own, current) if hasattr(strategy, "engine")]
    if ours and own is not current:
        raise ValueError(
            "A model must be created and split in the same `strategy.scope()`. Received: a model created "
            f"{'outside of any' if own is None else f'under {own!r}'}, split under {current!r}."
        )


def _build(model: keras.Model, sample) -> None:
    try:
        model(sample)
    except Exception as error:
        # The model's own code may raise any exception, which is the cause of this one.
        raise ValueError(
            f"`sample` must be an input of `{model.name}`. Received: {checks.shown(sample)}, for which "
            f"the model raised {type(error).__name__}."
        ) from error


def _check_state(model: keras.Model) -> None:
    if not model.built or not model.weights:
        raise ValueError(
            f"`{model.name}` must have variables. Received: a model that is not built. Build it first, "
            "or pass a sample: parallelize(..., sample=...)."
        )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        raise ValueError(
            f"`{model.name}` must be split before its optimizer is built. Received: an optimizer that "
            "has variables for whole weights. Split the model before its first `fit`."
        )


def _adapters(model: keras.Model, kinds: Mapping[str, str]) -> list[Adapter]:
    """The adapters of the layers that the plan includes."""
    adapters = []
    layers = all_layers(model)
    inside = parts_of_registered(layers)
    for layer in layers:
        if id(layer) in inside:
            continue
        own = _variables(layer)
        said = {v.path: kinds[v.path] for v in own if v.path in kinds}
        if not set(said.values()) - {"replicate"}:
            continue
        for variable in own:
            if layout_of(variable).slice is not None:
                raise ValueError(
                    f"`{variable.path}` cannot be split twice. Received: a plan with "
                    f"{said.get(variable.path)!r} for it."
                )
        adapters.append(_adapter(layer, said))
    return adapters


def _variables(layer) -> list:
    """The variables of one adapter; a registered split includes those of layers inside, too."""
    parts = [layer] if split_of(layer) is None else all_layers(layer)
    return [variable for part in parts for variable in variables_of_layer(part)]


def _adapter(layer, said: Mapping[str, str]) -> Adapter:
    """The adapter of one layer, from the words of the plan for its variables."""
    kind_of_adapter = adapter_class(layer)
    if kind_of_adapter is None:
        path, kind = next((path, kind) for path, kind in said.items() if kind != "replicate")
        raise ValueError(
            "A plan can only split Dense, EinsumDense and Embedding layers, attention through those "
            f"inside it, and layers with a registered split. Received: {kind!r} for `{path}` of a "
            f"{type(layer).__name__}. Register one by `tfdist.extend.register_split`, or use "
            "'replicate'."
        )
    _refuse_activity_regularizer(layer)
    mains = [variable.path for variable in kind_of_adapter.main(layer)]
    named = [path for path in mains if said.get(path, "replicate") != "replicate"]
    main = (named or mains)[0]
    kind = said.get(main, "replicate")
    if kind == "replicate":
        raise ValueError(
            f"A layer cannot be split unless the plan includes `{main}`. Received: {dict(said)}."
        )
    adapter = kind_of_adapter(layer, kind)
    split = {part.variable.path for part in adapter.parts}
    for path, word in said.items():
        if word != kind and not (word == "replicate" and path not in split):
            raise ValueError(
                f"A plan must use the same word for all variables of a layer. Received: {kind!r} for "
                f"`{main}` and {word!r} for `{path}`."
            )
    return adapter


def _refuse_activity_regularizer(layer) -> None:
    if layer.activity_regularizer is not None:
        raise ValueError(
            "An activity regularizer is not supported on a layer that is split. Received: "
            f"{layer.activity_regularizer!r} in `{layer.path}`. Use 'replicate' for it."
        )


def _start_alike(model: keras.Model, group: Group) -> None:
    """Sets the variables of all tensor ranks to those of the first, as `fit` does at its start."""
    for variable in model.variables:
        variable.assign(broadcast(variable.value, group, name="parallelize/values"))


@contextlib.contextmanager
def _constants_moved(model: keras.Model) -> Iterator[None]:
    """Adds noise to constant variables in its context, because zeros would hide differences.

    States that a run changes, such as those of seeds, are restored at the end too.
    """
    weights = {id(weight) for weight in model.weights}
    before = []
    for number, variable in enumerate(model.variables):
        value = variable.numpy()
        constant = value.size and keras.backend.is_float_dtype(variable.dtype)
        constant = constant and value.min() == value.max()
        if not constant and id(variable) in weights:
            continue
        before.append((variable, value))
        if constant and id(variable) in weights:
            noise = np.random.default_rng(number).uniform(0.0, 0.1, value.shape)
            variable.assign(value + noise.astype("float32"))
    try:
        yield
    finally:
        for variable, value in before:
            sharding = layout_of(variable).slice
            variable.assign(value if sharding is None else deep_copy(sharding.slice_of(value)))


@contextlib.contextmanager
def _all_or_nothing(model: keras.Model) -> Iterator[None]:
    """Restores layers and variables if an exception is raised in its context."""
    things: Sequence[Any] = [*all_layers(model), *model.variables]
    before = [(thing, type(thing), dict(vars(thing))) for thing in things]
    try:
        yield
    except BaseException:
        for thing, kind, then in before:
            if type(thing) is not kind:  # ZeRO-3 changes the class of a variable that it shards.
                thing.__class__ = kind
            vars(thing).clear()
            vars(thing).update(then)
        raise


def _forget_traces(model: keras.Model) -> None:
    """Removes traced functions, which use the whole variables."""
    for name in ("train_function", "test_function", "predict_function", "generate_function"):
        if getattr(model, name, None) is not None:
            setattr(model, name, None)


def _report(weights, kinds, adapters, group: Group | None) -> ParallelizeReport:
    parts = {
        id(part.variable): (adapter.kind, part.axis)
        for adapter in adapters
        for part in adapter.parts
    }
    rows = []
    for weight in weights:
        kind, axis = parts.get(id(weight), (kinds.get(weight.path), None))
        sharding = layout_of(weight).slice
        if sharding is not None:
            axis = sharding.dim
        local = tuple(weight.shape)
        held = int(np.prod(local)) * tf.as_dtype(weight.dtype).size
        rows.append(
            VariableReport(
                path=weight.path,
                kind=kind,
                axis=axis,
                shape=local if sharding is None else sharding.shape,
                local_shape=local,
                bytes_per_rank=held,
                replicated_bytes=held if axis is None else 0,
            )
        )
    return ParallelizeReport(1 if group is None else group.size, tuple(rows))
