"""Generation in a pipeline: a language model of KerasHub whose blocks are on several ranks.

Every rank runs the task's own program, `generate_step`, on a view of the task with only this rank's
blocks. So its cache of keys and values is that of these blocks, and samplers are KerasHub's. The output of
a stage is sent to the next as in training, and the last stage broadcasts the logits of each token; from the
same logits and seeds all ranks draw the same tokens.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.addons.hub.pipeline_relay import Block, Relay, ReplicatedLayer, SkippedLayer
from tfdist.collectives import broadcast
from tfdist.pipeline.runtime import PipelineRuntime

#: The attributes of KerasHub's language models that generation uses.
_PROGRAM = ("generate", "generate_step", "call_with_cache", "backbone")
_INPUTS = {"token_ids", "padding_mask"}
_WAY_OUT = (
    "Generate with the model on one device, or split over a tensor axis or by ZeRO stage 3: train it "
    "there, or save it with `save_to_preset` and load that."
)


class TextGenerator:
    """Generates with a task of KerasHub in a pipeline.

    Args:
        runtime: The pipeline on this rank.

    Raises:
        ValueError: The model is not such a task, or its program is not supported.
    """

    def __init__(self, runtime: PipelineRuntime):
        self._runtime = runtime
        self._task: Any = runtime.chain.model
        _check_task(self._task)
        self._sampler: Any = None
        #: The sampler of the last trace, and the traced function.
        self._traced: tuple[Any, Callable | None] = (None, None)

    def use(self, sampler) -> None:
        """Sets the sampler: a name, or one of KerasHub's objects."""
        self._sampler = _samplers().get(sampler)

    def generate(self, inputs, eager: bool, **options):
        """Runs `generate` of the task, optionally without a graph; every rank calls it identically."""
        sampler = self._sampler or getattr(self._task, "sampler", None)
        if sampler is None:
            self.use(inspect.signature(self._task.compile).parameters["sampler"].default)
            sampler = self._sampler
        world = self._runtime.group.engine.group()
        for seed in sampler.variables:
            # Without a given seed, each rank has drawn a different one.
            seed.assign(broadcast(seed.value, world, name="generate/seed"))
        view = self._view(sampler)
        view.run_eagerly = eager
        # An attribute of the task itself may call this method, so that of its class is used.
        outputs = type(view).generate(view, inputs, **options)
        self._traced = (sampler, view.generate_function)
        return outputs

    def _view(self, sampler):
        """The task as this rank runs it."""
        task, runtime = self._task, self._runtime
        relay = Relay(runtime.chain, runtime.partition, runtime.group, _WAY_OUT)
        backbone = _copy(task.backbone)
        blocks: list = [
            Block(relay, block)
            for block in task.backbone.transformer_layers
            if relay.is_here(relay.stage_of_block(block))
        ]
        own = blocks or [SkippedLayer()]
        vars(backbone).update(transformer_layers=own, num_layers=len(own))
        view = _copy(task)
        for owner in (backbone, view):
            for name, layer in list(vars(owner).items()):
                if relay.is_outer(layer):
                    vars(owner)[name] = ReplicatedLayer(relay, layer)
                elif layer is task.backbone:
                    vars(owner)[name] = backbone
        traced_for, function = self._traced
        vars(view).update(
            sampler=sampler, generate_function=function if traced_for is sampler else None
        )
        vars(view)["generate_step"] = self._step(view, relay)
        view.jit_compile = False
        return view

    def _step(self, view, relay: Relay):
        """The task's program; the results of its passes through the layers are the same on all ranks."""
        group = self._runtime.group
        last = self._runtime.last_stage % group.size
        reads_hidden = isinstance(view.sampler, _samplers().ContrastiveSampler)
        fills_cache = False

        def call_with_cache(*args, **kwargs):
            nonlocal fills_cache
            with relay.passing():
                logits, hidden, cache = type(view).call_with_cache(view, *args, **kwargs)
            # The first pass fills the cache: the logits of the prompt, which are large, are not used.
            if not fills_cache:
                logits = broadcast(logits, group, last, name="generate/logits")
            if reads_hidden:
                hidden = broadcast(hidden, group, last, name="generate/hidden")
            fills_cache = False
            return logits, hidden, cache

        # KerasHub's programs need no conversion, and errors are unchanged without it.
        @tf.autograph.experimental.do_not_convert
        def generate_step(inputs, stop_token_ids=None):
            nonlocal fills_cache
            fills_cache = True
            return type(view).generate_step(view, inputs, stop_token_ids=stop_token_ids)

        vars(view)["call_with_cache"] = call_with_cache
        return generate_step


def _check_task(task) -> None:
    missing = [name for name in _PROGRAM if not hasattr(task, name)]
    if missing:
        raise ValueError(
            "Generation in a pipeline requires a language model of KerasHub. Received: "
            f"`{task.name}` of type {type(task).__name__}, which has no `{missing[0]}`. {_WAY_OUT}"
        )
    inputs = task.input
    blocks: Sequence | None = getattr(task.backbone, "transformer_layers", None)
    known = isinstance(inputs, dict) and set(inputs) == _INPUTS
    if not known or blocks is None or getattr(task.backbone, "num_layers", None) != len(blocks):
        raise ValueError(
            "Generation in a pipeline requires a language model with the inputs token_ids and padding_mask, "
            f"and one list of transformer_layers. Received: a {type(task).__name__}. {_WAY_OUT}"
        )


def _copy(model: keras.Model):
    """A shallow copy of a model, with its own attributes and bound methods."""
    new = object.__new__(type(model))
    for name, value in vars(model).items():
        if isinstance(value, types.MethodType) and value.__self__ is model:
            value = types.MethodType(value.__func__, new)
        vars(new)[name] = value
    return new


def _samplers():
    # A program with a task of KerasHub has imported it.
    import keras_hub

    return keras_hub.samplers
