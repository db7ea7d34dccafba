"""`LayerSplit`: how a class of layers is split over the ranks of an axis, as its author says it."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import keras

from tfdist.collectives import Group
from tfdist.utils import checks

#: What a plan says of layers that are not split.
_NOT_SPLIT = "replicate"


@dataclasses.dataclass(frozen=True)
class Split:
    """Of a weight: each rank holds an equal part along one dim.

    Attributes:
        dim: The dim that is split; a negative one counts from the end.
        multiple_of: Each rank's part is a multiple of it.
    """

    dim: int
    multiple_of: int = 1

    def __post_init__(self) -> None:
        checks.integer("dim", self.dim)
        checks.integer("multiple_of", self.multiple_of, minimum=1)


#: What becomes of a weight: a slice on each rank; "whole" where every rank holds all of it and computes all
#: of its gradient; "partial" where every rank holds all of it but uses it on split activations, so that the
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

    A plan that says one of `kinds` of any weight of a layer, or of a layer inside it, splits the
    layer. One object serves all layers of the class, so it keeps no state of a layer.

    Attributes:
        kinds: The words by which plans name the ways in which the layer can be split, such as
            "column" and "row".
    """

    kinds: ClassVar[Sequence[str]]

    @abc.abstractmethod
    def weights(self, layer, kind: str) -> Mapping[str, Rule]:
        """What becomes of each weight.

        Args:
            layer: The layer, built and whole.
            kind: One of `kinds`.

        Returns:
            By path in the layer, which has the names of layers inside it ("kernel", "gate/kernel"): a
            `Split`; "whole" where every rank holds all of it and computes all of its gradient; "partial"
            where every rank holds all of it but uses it on split activations, so that the gradients of
            the ranks are summed over the axis.
            Every trainable weight must be named; others stay whole unless they are.

        Raises:
            ValueError: This layer cannot be split so.
        """

    @abc.abstractmethod
    def call(self, layer, kind: str, group: Group, original, *args, **kwargs):
        """Computes what the layer computes, with this rank's slices in the layer's variables.

        Args:
            layer: The layer.
            kind: How it is split.
            group: The ranks that split it.
            original: The layer's own `call`.
            *args: What the layer was called with.
            **kwargs: What the layer was called with.
        """

    def output_dim(self, layer, kind: str) -> int | None:
        """The dim of the output that stays split; None where every rank has the whole output."""
        del layer, kind
        return None

    def attributes(self, layer, kind: str, group: Group) -> Mapping[str, Any]:
        """Values of the layer's attributes on this rank, which they have during `call` alone.

        Args:
            layer: The layer, whole.
            kind: How it is split.
            group: The ranks that split it.

        Returns:
            By name, such as {"units": layer.units // group.size}. Those of layers inside are named
            by path: {"down/input_spec": None}.
        """
        del layer, kind, group
        return {}


_registered: dict[type, LayerSplit] = {}


def register_split(layer_class: type, split: LayerSplit) -> None:
    """Makes `tfdist.parallelize` split layers of a class as `split` says.

    It also holds for classes derived from it that have the same `call`. The most derived class that
    is registered decides, before what tfdist has built in. A second call for a class replaces the
    first. Every rank must make the same calls.

    Args:
        layer_class: A class of Keras layers.
        split: How they are split.

    Raises:
        TypeError: One of them is something else, or `split.kinds` is not a list of texts.
        ValueError: `split.kinds` has "replicate", which plans say of layers that are not split.
    """
    if not (isinstance(layer_class, type) and issubclass(layer_class, keras.layers.Layer)):
        raise TypeError(
            "`layer_class` must be a class derived from keras.layers.Layer. Received: "
            f"layer_class={checks.shown(layer_class)}. Pass the class, not a layer of it."
        )
    if not isinstance(split, LayerSplit):
        raise TypeError(
            "`split` must be an object of a class derived from LayerSplit. Received: "
            f"split={checks.shown(split)}. Pass an instance, such as MySplit()."
        )
    kinds = getattr(split, "kinds", None)
    is_list = isinstance(kinds, Sequence) and not isinstance(kinds, str)
    if not is_list or not kinds or not all(isinstance(kind, str) and kind for kind in kinds):
        raise TypeError(
            "`kinds` of a LayerSplit must be a tuple or list of texts, not empty. Received: "
            f"kinds={checks.shown(kinds)} of {type(split).__name__}. Name the ways in which the "
            "layer can be split, such as kinds = ('column', 'row')."
        )
    if _NOT_SPLIT in kinds:
        raise ValueError(
            f"`kinds` of a LayerSplit cannot contain {_NOT_SPLIT!r}, which plans say of layers that "
            f"are not split. Received: kinds={checks.shown(kinds)} of {type(split).__name__}. Use "
            "another name."
        )
    _registered[layer_class] = split


def registered_class(layer) -> type | None:
    """The class of a layer, or the most derived one above it, for which a split is registered."""
    return next((each for each in type(layer).__mro__ if each in _registered), None)


def split_of(layer) -> LayerSplit | None:
    """The split that is registered for a layer's class; None where there is none."""
    found = registered_class(layer)
    return None if found is None else _registered[found]


def registered_kinds() -> list[str]:
    """All words by which plans may name what is registered, each once."""
    return list(dict.fromkeys(kind for split in _registered.values() for kind in split.kinds))
