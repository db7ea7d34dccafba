"""`LayerSplit`: how to split a class of layers over the ranks of an axis."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import keras

from tfdist.collectives import Group
from tfdist.utils import checks

#: The word of plans for layers that are not split.
_NOT_SPLIT = "replicate"


@dataclasses.dataclass(frozen=True)
class Split:
    """A split of a weight into equal parts along one dim, one for each rank.

    Attributes:
        dim: The dim to split; a negative one counts from the end.
        multiple_of: The size of each part must be a multiple of this.
    """

    dim: int
    multiple_of: int = 1

    def __post_init__(self) -> None:
        checks.integer("dim", self.dim)
        checks.integer("multiple_of", self.multiple_of, minimum=1)


#: How to split a weight: a slice on each rank; "whole" if every rank holds all of it and computes all of its
#: gradient; "partial" if every rank holds all of it but applies it to split activations, so that the
#: ranks' gradients are summed over the axis.
Rule = Split | Literal["whole", "partial"]


class LayerSplit(abc.ABC):
    """How `tfdist.parallelize` splits a class of layers over the tensor axis.

    ```python
    class SplitGLU(LayerSplit):
        kinds = ("gated",)

        def weights(self, layer, kind):
            return {"gate": Split(1), "up": Split(1), "down": Split(0)}

        def call(self, layer, kind, group, original, inputs):
            return reduce_from_region(original(copy_to_region(inputs, group)), group)

    register_split(GLU, SplitGLU())
    tfdist.parallelize(model, {".*glu/.*": "gated"})
    ```

    A plan that maps any weight of a layer, or of a layer inside it, to one of `kinds` splits the layer. One
    object is used for all layers of the class, so it must not store the state of a layer.

    Attributes:
        kinds: The names of the ways to split the layer in plans, such as "column" and "row".
    """

    kinds: ClassVar[Sequence[str]]

    @abc.abstractmethod
    def weights(self, layer, kind: str) -> Mapping[str, Rule]:
        """Returns how to split each weight.

        Args:
            layer: The layer, built and whole.
            kind: One of `kinds`.

        Returns:
            By path in the layer, which contains the names of layers inside it ("kernel", "gate/kernel"): a
            `Split`; "whole" if every rank holds all of it and computes all of its gradient; "partial" if
            every rank holds all of it but applies it to split activations, so that the gradients of the
            ranks are summed over the axis. Every trainable weight must be included; other weights are whole
            by default.

        Raises:
            ValueError: This layer cannot be split in this way.
        """

    @abc.abstractmethod
    def call(self, layer, kind: str, group: Group, original, *args, **kwargs):
        """Computes the output of the layer, whose variables hold this rank's slices.

        Args:
            layer: The layer.
            kind: How it is split.
            group: The ranks that split it.
            original: The original `call` of the layer.
            *args: The arguments of the call.
            **kwargs: The keyword arguments of the call.
        """

    def output_dim(self, layer, kind: str) -> int | None:
        """The dim of the output that stays split; None if every rank has the whole output."""
        del layer, kind
        return None

    def attributes(self, layer, kind: str, group: Group) -> Mapping[str, Any]:
        """The values of the layer's attributes on this rank, which are set only during `call`.

        Args:
            layer: The layer, whole.
            kind: How it is split.
            group: The ranks that split it.

        Returns:
            By name, such as {"units": layer.units // group.size}; by path for attributes of layers inside:
            {"down/input_spec": None}.
        """
        del layer, kind, group
        return {}


_registered: dict[type, LayerSplit] = {}


def register_split(layer_class: type, split: LayerSplit) -> None:
    """Makes `tfdist.parallelize` split layers of a class by `split`.

    It also applies to derived classes with the same `call`. The most derived registered class takes
    precedence, also over the built-in splits. A second call for a class replaces the first. All ranks must
    make the same calls.

    Args:
        layer_class: A class of Keras layers.
        split: How to split them.

    Raises:
        TypeError: An argument has another type, or `split.kinds` is not a list of strings.
        ValueError: `split.kinds` contains "replicate", which plans use for layers that are not split.
    """
    if not (isinstance(layer_class, type) and issubclass(layer_class, keras.layers.Layer)):
        meaning = "a class derived from keras.layers.Layer, and not a layer"
        raise checks.refuse("layer_class", layer_class, meaning, TypeError)
    checks.instance("split", split, LayerSplit, "an instance of a class derived from LayerSplit")
    kinds = getattr(split, "kinds", None)
    is_list = isinstance(kinds, Sequence) and not isinstance(kinds, str)
    if not is_list or not kinds or not all(isinstance(kind, str) and kind for kind in kinds):
        meaning = "a non-empty tuple or list of strings, such as ('column', 'row')"
        raise checks.refuse(f"{type(split).__name__}.kinds", kinds, meaning, TypeError)
    if _NOT_SPLIT in kinds:
        raise ValueError(
            f"`kinds` of a LayerSplit cannot contain {_NOT_SPLIT!r}, which plans use for layers that "
            f"are not split. Received: kinds={checks.shown(kinds)} of {type(split).__name__}. Use "
            "another name."
        )
    _registered[layer_class] = split


def registered_class(layer) -> type | None:
    """The most derived class of a layer for which a split is registered; None if there is none."""
    return next((each for each in type(layer).__mro__ if each in _registered), None)


def split_of(layer) -> LayerSplit | None:
    """The split that is registered for a layer's class; None if there is none."""
    found = registered_class(layer)
    return None if found is None else _registered[found]


def registered_kinds() -> list[str]:
    """The names in plans of all registered splits, each once."""
    return list(dict.fromkeys(kind for split in _registered.values() for kind in split.kinds))
