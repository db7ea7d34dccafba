"""How layers that are called one by one, in the order of a chain, pass tensors from stage to stage.

A program that calls a model's layers itself, as KerasHub's with a cache do, knows nothing of stages.
On each rank it runs whole, with stand-ins for the layers. One for a layer of another rank returns zeros
of the right shape; before the first layer of a stage its tensor arrives from the stage before.
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
    """Where a pass through the layers is, and what goes from stage to stage on the way.

    Args:
        chain: The chain.
        partition: What lies on which stage.
        group: The pipeline axis.
        way_out: What to do instead where a model cannot be run so, for messages.

    Raises:
        ValueError: More than one tensor leads from a stage to the next.
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
            for layer in (x for link in partition.links(stage) for x in link.layers if x.weights):
                self._layers[id(layer)] = layer
                self._stages.setdefault(id(layer), []).append(stage)
        blocks = chain.model.backbone.transformer_layers
        self._blocks = {id(block) for block in blocks}
        #: By stage the layer, no block, that makes what the next stage gets.
        self._makers: dict[int, int] = {}
        for stage, end in enumerate(partition.ends[:-1]):
            self._makers[stage] = self._maker(chain, end)

    def _maker(self, chain: Chain, end: int) -> int:
        leads = chain.before(end)
        name = chain.links[end - 1].name
        if len(leads) > 1:
            raise self.refuse(f"stages that share tensors, as behind `{name}`")
        maker, readers = chain.made_and_read(leads[0])
        if id(maker) in self._layers and id(maker) not in self._blocks:
            return id(maker)
        if readers > 1:
            raise self.refuse(f"a cut behind `{name}`, where what it makes is read {readers} times")
        return 0

    def refuse(self, what: str) -> ValueError:
        """The error of a model that cannot be run so."""
        return ValueError(
            f"A pipeline cannot generate with {what}. Received: a {self.name}. {self.way_out}"
        )

    def is_here(self, stage: int) -> bool:
        """Whether a stage lies on this rank."""
        return stage % self.group.size == self.group.rank

    def is_outer(self, layer) -> bool:
        """Whether something is a layer with weights of the chain, and no block."""
        return id(layer) in self._layers and id(layer) not in self._blocks

    def stage_of_block(self, block: keras.Layer) -> int:
        """The stage of a block."""
        stages = self._stages.get(id(block), [])
        if not stages:
            raise self.refuse(f"blocks such as `{block.name}` inside of a part that is not cut")
        if len(stages) != 1:
            raise self.refuse(f"the block `{block.name}`, which is called on {len(stages)} stages")
        return stages[0]

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """One pass through all layers."""
        self._at, self._called = 0, set()
        yield
        missing = [
            layer.name
            for key, layer in self._layers.items()
            if key not in self._called and any(map(self.is_here, self._stages[key]))
        ]
        if self._at != self._num_stages - 1 or missing:
            raise self.refuse(f"layers that its program leaves out: {missing or self._at}")

    def enter(self, layer: keras.Layer, x):
        """A layer is called: its tensor as its stage gets it, and the stage."""
        self._called.add(id(layer))
        stages = [stage for stage in self._stages[id(layer)] if stage >= self._at]
        if not stages:
            raise self.refuse(f"`{layer.name}` called behind layers of later stages")
        return self._advance(x, stages[0]), stages[0]

    def leave(self, layer: keras.Layer, y, stage: int):
        """What a layer has made, as what follows gets it."""
        return self._advance(y, stage + 1) if self._makers.get(stage) == id(layer) else y

    def _advance(self, x, to: int):
        """What leads from the stage that the pass is in to another, on the ranks of both."""
        for stage in range(self._at, to):
            name = f"generate/stage{stage}"
            if self.is_here(stage) == self.is_here(stage + 1):
                continue
            if self.is_here(stage):
                send_tensor(x, self.group, (stage + 1) % self.group.size, name=name)
            else:
                source = stage % self.group.size
                # A loop would ask for what later tokens send, before it knows this one.
                with tf.control_dependencies([x]):
                    x = receive_tensor(
                        shape_of(x), x.dtype, self.group, source, name=name, unused=True
                    )
        self._at = max(self._at, to)
        return x


class Block:
    """Stands for a block of this rank. A program can call it, and do nothing else."""

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


class Idle:
    """Stands for the blocks of a rank that has none: it hands on what it gets."""

    def __call__(self, x, *args, **kwargs):
        """The tensor and the cache, as they are."""
        return x, next(value for name, value in kwargs.items() if name.endswith("cache"))


class Outer:
    """Stands for a layer beside the blocks, as the embedding, wherever it lies."""

    def __init__(self, relay: Relay, layer: keras.Layer):
        self._relay, self._layer = relay, layer

    def __call__(self, x, *args, **kwargs):
        """Calls the layer, or makes zeros in place of what it would return."""
        x, stage = self._relay.enter(self._layer, x)
        if self._relay.is_here(stage):
            y = self._layer(x, *args, **kwargs)
        else:
            y = _zeros_as_of(self._layer, x, args, kwargs)
        return self._relay.leave(self._layer, y, stage)

    def __getattr__(self, name: str):
        raise self._relay.refuse(f"`{self._layer.name}` of which its program reads `{name}`")


def _zeros_as_of(layer: keras.Layer, x: tf.Tensor, args: tuple, kwargs: dict) -> tf.Tensor:
    """Zeros of the shape of what a layer returns, whose variables have no values here."""
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
    # What is not known are rows and tokens.
    known = shape_of(x)
    shape = [known[dim] if size is None else size for dim, size in enumerate(y.shape)]
    # As the layer would, they wait for what it gets.
    with tf.control_dependencies([x]):
        return tf.zeros(shape, y.dtype)
