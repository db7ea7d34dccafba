"""KerasHub's blocks of experts: computed sparsely, and spread over the expert axis, in place.

KerasHub computes every expert for every token and multiplies most results by zero. Here only the
experts chosen by the router process a token, on the rank that has them. Layers, weights and
configuration stay KerasHub's, so saved files load into plain KerasHub.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.backend.keras.functional import is_deferred
from tfdist.backend.keras.private import all_layers
from tfdist.collectives import Group, broadcast
from tfdist.experts.dispatch import are_there, through_experts
from tfdist.experts.permutation import sort_by_expert
from tfdist.sharding.experts import check_experts, expert_group
from tfdist.sharding.layout import layout_of
from tfdist.sharding.parts import Slice
from tfdist.step.context import current_strategy
from tfdist.tensor_parallel.adapters import override
from tfdist.tensor_parallel.banks import BANKS, Bank
from tfdist.tensor_parallel.slicing import slice_variable, unshard_variable
from tfdist.zero.sharded_variable import ShardedVariable, shard_variable

#: By the class of a block, the attributes of its router, its bank, and its shared expert and gate.
_BLOCKS = {
    "MixtralSparseMoeBlock": ("_sparse_feedforward_gate_dense", "expert_bank", None),
    "QwenSparseMoeBlock": (
        "_sparse_feedforward_gate_dense",
        "expert_bank",
        ("shared_expert_dense", "shared_expert_gate_dense"),
    ),
    "Qwen3SparseMoeBlock": ("_sparse_feedforward_gate_dense", "expert_bank", None),
    "Qwen3_5MoeSparseMoeBlock": (
        "_router_gate",
        "expert_bank",
        ("shared_expert", "_shared_expert_gate"),
    ),
    "GptOssSparseMoeBlock": ("router", "experts", None),
    "Gemma4TextDecoderBlock": ("moe_router", "moe_expert_bank", None),
}
#: The names of the weight of the balance loss in blocks.
_COEFFICIENTS = ("router_aux_loss_coef", "router_aux_loss_coefficient")


@dataclasses.dataclass(frozen=True)
class ExpertBlock:
    """A layer of KerasHub's with a router and a bank of experts.

    Attributes:
        layer: The layer.
        router: Its router.
        bank: Its experts, and their computation.
        shared: The expert for all tokens and its gate, or None.
    """

    layer: keras.layers.Layer
    router: keras.layers.Layer
    bank: Bank
    shared: tuple[keras.layers.Layer, keras.layers.Layer] | None

    def check(self, group: Group | None) -> None:
        """Checks that the number of experts is divisible by the size of the expert axis.

        Raises:
            ValueError: It is not.
        """
        check_experts(self.bank.num_experts, group, self.bank.layer)

    def apply(self, group: Group | None) -> None:
        """Splits the experts' weights, and overrides the layer's computation."""
        if group is not None:
            for variable in self.bank.variables:
                self._cut(variable, group)
        if type(self.layer).__name__.startswith("Gemma4"):
            override(self.bank.layer, "call", self._weighed(group))
        elif type(self.layer).__name__.startswith("GptOss"):
            override(self.layer, "call", self._scored(group))
        else:
            override(self.layer, "call", self._routed(group))

    def _cut(self, variable: keras.Variable, group: Group) -> None:
        """Splits a variable by experts; under ZeRO-3, fewer ranks then share it."""
        was_sharded = isinstance(variable, ShardedVariable)
        unshard_variable(variable)
        slice_variable(self.bank.layer, variable, Slice(group, 0, tuple(variable.shape)))
        strategy = current_strategy()
        if not was_sharded or strategy is None:
            return
        others = strategy.group(*layout_of(variable).gradient_axes(strategy.mesh))
        if others.size > 1:
            shard_variable(variable, others)

    def _through(self, tokens, experts, gates, group: Group | None):
        bank = self.bank
        permutation = sort_by_expert(experts, bank.num_experts, is_there=are_there())
        gates = tf.cast(gates, tf.float32)
        return through_experts(tokens, gates, permutation, bank, group, bank.layer.path)

    def _routed(self, group: Group | None) -> Callable:
        """The computation of Mixtral's and Qwen's blocks."""
        layer, top_k = self.layer, self.layer.top_k
        module = sys.modules[type(layer).__module__]
        normalize = getattr(layer, "norm_top_k_prob", True)
        weight = next(getattr(layer, name) for name in _COEFFICIENTS if hasattr(layer, name))

        def call(hidden_states, attention_mask=None, training=None):
            tokens = tf.reshape(hidden_states, [-1, hidden_states.shape[-1]])
            logits = self.router(tokens)
            gates, experts = tf.math.top_k(keras.ops.softmax(logits, axis=-1), k=top_k)
            if normalize:
                gates /= tf.reduce_sum(gates, axis=-1, keepdims=True)
            y = self._through(tokens, experts, gates, group)
            if self.shared is not None:
                shared, gate = self.shared
                y += shared(tokens) * keras.ops.sigmoid(gate(tokens))
            if training:
                # KerasHub's function, which is patched to use all ranks' tokens.
                balance = module.compute_load_balancing_loss(
                    router_logits=logits,
                    num_experts=self.bank.num_experts,
                    top_k=top_k,
                    attention_mask=attention_mask,
                )
                layer.add_loss(weight * balance)
            return tf.reshape(y, tf.shape(hidden_states)), logits

        return call

    def _scored(self, group: Group | None) -> Callable:
        """The computation of GPT-OSS, whose router's scores are zero except for the chosen experts."""
        top_k = self.layer.top_k

        def call(hidden_states):
            tokens = tf.reshape(hidden_states, [-1, hidden_states.shape[-1]])
            scores = self.router(tokens)
            gates, experts = tf.math.top_k(scores, k=top_k)
            y = self._through(tokens, experts, gates, group)
            return tf.reshape(y, tf.shape(hidden_states)), scores

        return call

    def _weighed(self, group: Group | None) -> Callable:
        """The computation of Gemma 4's bank, which gets such scores."""
        top_k = self.router.num_experts_per_token

        def call(x, dispatch_weights):
            gates, experts = tf.math.top_k(dispatch_weights, k=top_k)
            return self._through(x, experts, gates, group)

        return call


def find_experts(model: keras.Model) -> list[ExpertBlock]:
    """KerasHub's blocks of experts in a model, except for those that are sparse already."""
    found = []
    for layer in all_layers(model):
        names = _BLOCKS.get(type(layer).__name__)
        if names is None or not type(layer).__module__.startswith("keras_hub."):
            continue
        router, bank, shared = names
        experts = getattr(layer, bank, None)
        if experts is None or "call" in vars(layer) or "call" in vars(experts):
            continue
        if getattr(layer, "router_jitter_noise", 0):
            continue  # It draws random numbers for the router, which differ in a sparse computation.
        kind = BANKS[type(experts).__name__]
        both = None if shared is None else tuple(getattr(layer, name) for name in shared)
        found.append(ExpertBlock(layer, getattr(layer, router), kind(experts), both))
    return found


def spread_experts(blocks: Sequence[ExpertBlock]) -> None:
    """Makes blocks sparse and splits experts over the expert axis; every rank must call this.

    Each is then compared with its earlier computation, on a few generated tokens.

    Raises:
        ValueError: A block computes different results than before.
    """
    group = expert_group()
    for block in blocks:
        variables = block.bank.variables
        deferred = any(is_deferred(variable) for variable in variables)
        if deferred:
            block.apply(group)
            continue
        if group is not None:
            for variable in variables:
                variable.assign(broadcast(variable.value, group, name="parallelize/experts"))
        tokens = _made_up_tokens(block)
        before = _outputs(block, tokens)
        block.apply(group)
        off = float(tf.norm(_outputs(block, tokens) - before))
        close = 0.1 if tokens.dtype.size < 4 else 1e-3
        if not off <= close * float(tf.norm(before)):
            raise ValueError(
                f"The sparse `{block.layer.path}` does not compute the same as KerasHub's. Received: "
                f"outputs that differ by {off:.2e} of {float(tf.norm(before)):.2e}."
            )


def _made_up_tokens(block: ExpertBlock) -> tf.Tensor:
    width = block.bank.width
    tokens = tf.random.stateless_normal([1, 8, width], seed=[0, 1])
    return tf.cast(tokens, block.layer.compute_dtype)


def _outputs(block: ExpertBlock, tokens: tf.Tensor) -> tf.Tensor:
    if "dispatch_weights" in inspect.signature(block.bank.layer.call).parameters:
        scores = block.router(tokens)
        found = block.bank.layer(tf.reshape(tokens, [-1, tokens.shape[-1]]), scores)
    else:
        found = block.layer(tokens)[0]
    return tf.cast(found, tf.float32)
