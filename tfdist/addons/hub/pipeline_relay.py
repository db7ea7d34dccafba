"""Passes tensors between stages when a program calls a model's layers one by one, in their order.

A program that calls a model's layers itself, as KerasHub's generation with a cache does, has no notion
of stages. On each rank it runs as a whole, with wrappers for the layers. The wrapper of a layer on another
rank returns zeros of the right shape; before the first layer of a stage, its input is received from the
previous stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfdist.backend.keras.functional import trace_graph
from tfdist.collectives import Group
from tfdist.collectives.run import receive_tensor, send_tensor, shape_of
from tfdist.pipeline.chain import Chain
from tfdist.pipeline.partition import Partition


class Relay:
    """The position of a pass through the layers, and the communication between stages.

    Args:
        chain: The chain of layers.
        partition: The assignment of layers to stages.
        group: The pipeline axis.
        way_out: The remedy for an unsupported model, for messages.

    Raises:
        ValueError: More than one tensor is passed from a stage to the next.
    """

    def __init__(self, chain: Chain, partition: Partition, group: Group, way_out: str):
        self.group, self.name, self.way_out = group, type(chain.model).__name__, way_out
        self._num_stages = partition.num_stages
        self._at = 0
        self._called: set[int] = set()
        self._blocks: set[int] = set()
        self._layers: dict[int, keras.Layer] = {}
        self._stages: dict[int, list[int]] = {}
        for stage in range(partition.num_stages):
            for layer in (
                x for each in partition.segments(stage) for x in each.layers if x.weights
            ):
                self._layers[id(layer)] = layer
                self._stages.setdefault(id(layer), []).append(stage)
        blocks = chain.model.backbone.transformer_layers
        self._blocks = {id(block) for block in blocks}
        #: By stage, the layer other than a block whose output the next stage receives.
        self._makers: dict[int, int] = {}
        for stage, end in enumerate(partition.ends[:-1]):
            self._makers[stage] = self._maker(chain, end)

    def _maker(self, chain: Chain, end: int) -> int:
        leads = chain.before(end)
        name = chain.segments[end - 1].name
        if len(leads) > 1:
            raise self.refuse(f"stages that share tensors, as after `{name}`")
        maker, readers = chain.made_and_read(leads[0])
        if id(maker) in self._layers and id(maker) not in self._blocks:
            return id(maker)
        if readers > 1:
            raise self.refuse(
                f"a stage that ends with `{name}`, whose output is read {readers} times"
            )
        return 0

    def refuse(self, what: str) -> ValueError:
        """The error for a model that is not supported."""
        return ValueError(
            f"A pipeline cannot generate with {what}. Received: a {self.name}. {self.way_out}"
        )

    def is_here(self, stage: int) -> bool:
        """Whether a stage is on this rank."""
        return stage % self.group.size == self.group.rank

    def is_outer(self, layer) -> bool:
        """Whether an object is a layer of the chain with weights, but not a block."""
        return id(layer) in self._layers and id(layer) not in self._blocks

    def stage_of_block(self, block: keras.Layer) -> int:
        """The stage of a block."""
        stages = self._stages.get(id(block), [])
        if not stages:
            raise self.refuse(f"blocks such as `{block.name}` inside a layer that cannot be split")
        if len(stages) != 1:
            raise self.refuse(f"the block `{block.name}`, which is called on {len(stages)} stages")
        return stages[0]

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Runs one pass through all layers in its context."""
        self._at, self._called = 0, set()
        yield
        missing = [
            layer.name
            for key, layer in self._layers.items()
            if key not in self._called and any(map(self.is_here, self._stages[key]))
        ]
        if self._at != self._num_stages - 1 or missing:
            raise self.refuse(f"layers that its program skips: {missing or self._at}")

    def enter(self, layer: keras.Layer, x):
        """The input of a layer on its stage, and the stage; called before the layer."""
        self._called.add(id(layer))
        stages = [stage for stage in self._stages[id(layer)] if stage >= self._at]
        if not stages:
            raise self.refuse(f"`{layer.name}` called after layers of later stages")
        return self._advance(x, stages[0]), stages[0]

    def leave(self, layer: keras.Layer, y, stage: int):
        """The output of a layer for the layers after it."""
        return self._advance(y, stage + 1) if self._makers.get(stage) == id(layer) else y

    def _advance(self, x, to: int):
        """Passes a tensor from the current stage to a later one, on the ranks of both."""
        for stage in range(self._at, to):
            name = f"generate/stage{stage}"
            if self.is_here(stage) == self.is_here(stage + 1):
                continue
            if self.is_here(stage):
                send_tensor(x, self.group, (stage + 1) % self.group.size, name=name)
            else:
                source = stage % self.group.size
                # In a loop, a receive must not start before the tensor of an earlier token is known.
                with tf.control_dependencies([x]):
                    x = receive_tensor(
                        shape_of(x), x.dtype, self.group, source, name=name, unused=True
                    )
        self._at = max(self._at, to)
        return x


class Block:
    """A wrapper for a block of this rank. A program can only call it."""

    def __init__(self, relay: Relay, layer: keras.Layer):
        self._relay, self._layer = relay, layer

    def __call__(self, x, *args, **kwargs):
        """Calls the block."""
        x, _ = self._relay.enter(self._layer, x)
        found = self._layer(x, *args, **kwargs)
        if not isinstance(found, tuple) or len(found) != 2:
            raise self._relay.refuse(f"`{self._layer.name}`, which returns more than a cache")
        return found

    def __getattr__(self, name: str):
        raise self._relay.refuse(f"blocks of which its program reads `{name}`")


class SkippedLayer:
    """A wrapper in place of the blocks of a rank that has none: it returns its input."""

    def __call__(self, x, *args, **kwargs):
        """The tensor and the cache, unchanged."""
        return x, next(value for name, value in kwargs.items() if name.endswith("cache"))


class ReplicatedLayer:
    """A wrapper for a layer other than a block, such as the embedding, on any rank."""

    def __init__(self, relay: Relay, layer: keras.Layer):
        self._relay, self._layer = relay, layer

    def __call__(self, x, *args, **kwargs):
        """Calls the layer, or returns zeros in place of its output."""
        # In eager mode, token ids are NumPy arrays.
        x, stage = self._relay.enter(self._layer, tf.convert_to_tensor(x))
        if self._relay.is_here(stage):
            y = self._layer(x, *args, **kwargs)
        else:
            y = _zeros_as_of(self._layer, x, args, kwargs)
        return self._relay.leave(self._layer, y, stage)

    def __getattr__(self, name: str):
        raise self._relay.refuse(f"`{self._layer.name}` of which its program reads `{name}`")


def _zeros_as_of(layer: keras.Layer, x: tf.Tensor, args: tuple, kwargs: dict) -> tf.Tensor:
    """Zeros of the shape of a layer's output; the layer's variables have no values here."""
    flat = tf.nest.flatten((x, args, kwargs))
    places = [place for place, each in enumerate(flat) if tf.is_tensor(each)]

    def forward(*tensors):
        given = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        first, others, named = tf.nest.pack_sequence_as((x, args, kwargs), given)
        zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in layer.variables]
        with keras.StatelessScope(zeros, initialize_variables=False):
            return layer(first, *others, **named)

    specs = [tf.TensorSpec(flat[place].shape, flat[place].dtype) for place in places]
    (y,) = trace_graph(forward, specs).outputs
    # The unknown sizes are those of rows and tokens.
    known = shape_of(x)
    shape = [known[dim] if size is None else size for dim, size in enumerate(y.shape)]
    # Like the layer's output, they depend on its input.
    with tf.control_dependencies([x]):
        return tf.zeros(shape, y.dtype)
