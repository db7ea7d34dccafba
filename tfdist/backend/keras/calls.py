"""The calls of a functional model, including those inside the models that it calls.

A task of KerasHub calls its backbone as one layer; a pipeline requires access to the blocks inside.

- `Function._nodes_by_depth` and `Node`: the order in which a functional model runs, and its data flow.
- `Functional._standardize_inputs`: inputs in the order of `model.inputs`, in their dtypes.

`tests/backend/keras/test_calls.py` fails if one of them changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from tfdist.backend.keras.attributes import history, inbound_nodes
from tfdist.backend.keras.private import Functional, Node, Operation, get_keras_mask, set_keras_mask


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call of a layer or of an operation on symbolic tensors.

    Attributes:
        operation: The layer or operation.
        args: Positional arguments, which may contain symbolic tensors.
        kwargs: Keyword arguments, which may contain symbolic tensors.
        reads: The tensors in the arguments.
        makes: The tensors that it returns.
    """

    operation: Operation
    args: tuple
    kwargs: dict[str, Any]
    reads: tuple[keras.KerasTensor, ...]
    makes: tuple[keras.KerasTensor, ...]


def functional_of(model: keras.Model) -> Functional:
    """The graph of a Sequential or functional model.

    Raises:
        ValueError: The model is neither, or its `call` is overridden.
    """
    if isinstance(model, keras.Sequential):
        if not model.built:
            raise ValueError(
                f"The input shape of the model `{model.name}` is not known. Begin it with a keras.Input."
            )
        model = model._functional
    if not isinstance(model, Functional) or owns_call(model):
        own = " with an overridden `call`" if isinstance(model, Functional) else ""
        raise ValueError(
            "A pipeline requires a list of layers, a Sequential or a functional model. Received: "
            f"`{model.name}` of type {type(model).__name__}{own}."
        )
    return model


def owns_call(model: keras.Model) -> bool:
    """Whether a functional model overrides `call`, so that a call may differ from its graph."""
    return type(model).call not in (Functional.call, keras.Sequential.call) or "call" in vars(model)


def made_by(tensor) -> tuple[Operation, list[keras.KerasTensor]] | None:
    """The operation that created a symbolic tensor, and the symbolic tensors in its arguments.

    Returns:
        None for a tensor that is not symbolic, or that was not created by an operation.
    """
    made = history(tensor, None) if _is_symbolic(tensor) else None
    if made is None or made.operation is None:
        return None
    return made.operation, inbound_nodes(made.operation)[made.node_index].input_tensors


def calls_of(model: keras.Model) -> tuple[list[Call], list[keras.KerasTensor]]:
    """The calls of a model in the order in which Keras runs them, and its outputs.

    Models that the model calls are replaced by their calls, unless their graph does not describe them
    completely. Each call of a model has separate tensors.

    Returns:
        The calls, and the model's outputs: tensors of these calls, or inputs of the model.

    Raises:
        ValueError: The model is not functional.
    """
    graph = functional_of(model)
    known = {id(tensor): tensor for tensor in graph.inputs}
    calls: list[Call] = []
    _add(calls, graph, known, as_they_are=True)
    return calls, [known[id(tensor)] for tensor in graph.outputs]


def flat_inputs(model: keras.Model, x) -> list:
    """The inputs in a call of a model, in the order of `model.inputs` and in their dtypes.

    Raises:
        ValueError: They do not match the inputs of this model.
    """
    found = functional_of(model)._standardize_inputs(x)
    if len(found) != len(model.inputs):
        names = [tensor.name for tensor in model.inputs]
        given = keras.tree.map_structure(lambda tensor: tuple(tensor.shape), x)
        raise ValueError(
            f"`{model.name}` requires the inputs {names}. Received: tensors of shapes {given}."
        )
    for tensor, symbol in zip(found, model.inputs, strict=True):
        if tensor is None:
            raise ValueError(
                f"A pipeline requires a tensor for each input. Received: None for `{symbol.name}`."
            )
    return found


def model_of(
    calls: Sequence[Call],
    inputs: Sequence[keras.KerasTensor],
    outputs: Sequence[keras.KerasTensor],
) -> keras.Model:
    """A model of some of the calls, from a list of tensors to a list of tensors."""
    begin = [
        keras.Input(batch_shape=t.shape, dtype=t.dtype, sparse=t.sparse, name=f"{t.name}_{place}")
        for place, t in enumerate(inputs)
    ]
    known = {id(tensor): new for tensor, new in zip(inputs, begin, strict=True)}
    for call in calls:
        args, kwargs = _filled((call.args, call.kwargs), known)
        made = [_copy(tensor) for tensor in call.makes]
        Node(call.operation, call_args=args, call_kwargs=kwargs, outputs=made)
        known |= {id(tensor): new for tensor, new in zip(call.makes, made, strict=True)}
    return keras.Model(begin, [known[id(tensor)] for tensor in outputs])


def _add(calls: list[Call], graph: Functional, known: dict, *, as_they_are: bool) -> None:
    """Adds the calls of a graph, and its tensors by id to `known`."""
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if node.is_input:
                continue
            args, kwargs = _filled((node.arguments.args, node.arguments.kwargs), known)
            inside = _graph_inside(node.operation, args, kwargs)
            if inside is not None:
                graph_inside, given = inside
                entered = _entered(calls, graph_inside, given)
                inner = dict(zip(map(id, graph_inside.inputs), entered, strict=True))
                _add(calls, graph_inside, inner, as_they_are=False)
                made = [inner[id(tensor)] for tensor in graph_inside.outputs]
            else:
                made = list(node.outputs) if as_they_are else [_copy(t) for t in node.outputs]
                reads = [t for t in keras.tree.flatten((args, kwargs)) if _is_symbolic(t)]
                calls.append(Call(node.operation, args, kwargs, tuple(reads), tuple(made)))
            known |= {id(tensor): new for tensor, new in zip(node.outputs, made, strict=True)}


def _graph_inside(
    operation: Operation, args: tuple, kwargs: dict
) -> tuple[Functional, list[keras.KerasTensor]] | None:
    """The graph of a called model, if running its calls one by one is equivalent.

    Returns:
        The graph, and the arguments in the order of its inputs.
    """
    if not isinstance(operation, Functional | keras.Sequential) or owns_call(operation):
        return None
    graph = operation._functional if isinstance(operation, keras.Sequential) else operation
    is_plain = type(operation).__call__ is keras.Layer.__call__
    if graph is None or not is_plain or operation.activity_regularizer is not None:
        return None
    # Keras passes the `training` of the outermost model, regardless of the argument of an inner call. The
    # masks of a model's inputs are another argument, with the structure of the inputs.
    others = {k: v for k, v in kwargs.items() if k not in ("inputs", "training")}
    first = [*args, *([kwargs["inputs"]] if "inputs" in kwargs else [])]
    if len(first) != 1 or any(value is not None for value in keras.tree.flatten(others)):
        return None
    given = _by_input(graph, first[0])
    fits = len(given) == len(graph.inputs) and all(
        # A mask from outside is not in the inner tensors. Keras changes the ranks of some tensors.
        _is_symbolic(t) and get_keras_mask(t) is None and len(t.shape) == len(own.shape)
        for t, own in zip(given, graph.inputs, strict=True)
    )
    return (graph, given) if fits else None


def _by_input(graph: Functional, given) -> list:
    """Arguments in the order of the inputs of a graph, as in Keras; [] if a name is missing."""
    if isinstance(given, dict) and not isinstance(graph.input, dict):
        names = [tensor.name for tensor in graph.inputs]
        return keras.tree.flatten([given[name] for name in names if name in given])
    return [] if given is None else keras.tree.flatten(given)


def _entered(
    calls: list[Call], graph: Functional, given: list[keras.KerasTensor]
) -> list[keras.KerasTensor]:
    """The inputs of the inner calls; a model casts its inputs to the dtypes of its graph."""
    found = []
    for tensor, own in zip(given, graph.inputs, strict=True):
        if tensor.dtype != own.dtype:
            cast = keras.ops.cast(keras.KerasTensor(tensor.shape, tensor.dtype), own.dtype)
            operation = history(cast).operation
            calls.append(Call(operation, (tensor,), {}, (tensor,), (cast,)))
            tensor = cast
        found.append(tensor)
    return found


def _filled(structure, known: dict):
    """A structure with its tensors replaced by id."""
    return keras.tree.map_structure(lambda x: known[id(x)] if _is_symbolic(x) else x, structure)


def _copy(tensor: keras.KerasTensor) -> keras.KerasTensor:
    """A tensor of the same kind without a history."""
    copy = keras.KerasTensor(tensor.shape, tensor.dtype, sparse=tensor.sparse, name=tensor.name)
    if (mask := get_keras_mask(tensor)) is not None:
        set_keras_mask(copy, mask)
    return copy


def _is_symbolic(x) -> bool:
    return isinstance(x, keras.KerasTensor)
