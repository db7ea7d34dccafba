"""`MixtureOfExperts`: many feed-forward networks, of which a few process each token."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.compiling import check_sizes_may_change, excluded
from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.collectives import all_gather, all_reduce
from tfdist.collectives.mappings import copy_to_region
from tfdist.experts.balancing import BiasState
from tfdist.experts.dispatch import are_there, through_experts
from tfdist.experts.losses import (
    Tokens,
    balance_loss,
    balance_loss_of_sequences,
    count_choices,
    router_z_loss,
)
from tfdist.experts.network import ExpertNetworks
from tfdist.experts.permutation import capacity_of, count_by_expert, sort_by_expert
from tfdist.experts.router import SCORES, Routing, route
from tfdist.experts.usage import ExpertUsage
from tfdist.layers.base import check_divides
from tfdist.layers.dense import TwoProducts
from tfdist.layers.feed_forward import ACTIVATIONS, ParallelMLP
from tfdist.layers.initializers import initializer
from tfdist.sharding.experts import check_experts, expert_group
from tfdist.sharding.layout import global_shape
from tfdist.sharding.weights import value_tensor
from tfdist.step.context import current_replica
from tfdist.utils import checks

_BALANCE_OVER = ("batch", "sequence")


@keras.saving.register_keras_serializable(package="tfdist")
class MixtureOfExperts(TwoProducts):
    """A layer of several feed-forward networks (experts), of which `top_k` process each token.

    ```python
    x = x + tfdist.experts.MixtureOfExperts(num_experts=8, hidden_dim=4 * width)(x)
    ```

    A router scores the experts for each token; the outputs of the best are summed, times their
    gates. By default no token is dropped, and there is no padding: memory is proportional to tokens x top_k,
    and independent of the number of experts. Under a strategy with an expert axis the experts are split over
    its ranks; tokens are sent to the ranks of their experts, and results returned, in two uneven
    all-to-alls. With a tensor axis each expert's hidden units are split. Router and losses are those of one
    process: they include the tokens of all ranks.

    Args:
        num_experts: The number of experts, a multiple of the size of the expert axis.
        hidden_dim: The number of hidden units of each, a multiple of the size of the tensor axis.
        top_k: The number of experts that process a token.
        activation: "swiglu" (a gate through SiLU, times a second product), "gelu" (the tanh
            approximation), or a name of `keras.activations`.
        use_bias: Whether the experts' products have a bias.
        scores: The function from logits to scores: "softmax" or "sigmoid".
        score_first: Whether scores are computed from the logits of all experts, before the choice;
            otherwise from those of the chosen experts.
        normalize_gates: Whether the gates of a token are divided by their sum; None for `top_k > 1`, since a
            single gate would always be 1, and the router could not learn.
        gate_scale: The factor of the gates.
        shared_hidden_dim: The number of hidden units of a network that processes every token, in addition
            to the experts; None for no such network.
        shared_gate: Whether the output of this network is multiplied by a sigmoid gate.
        capacity_factor: None for no dropped tokens. Otherwise an expert processes at most this many times
            its even share of a rank's choices, those with the largest gates. Which tokens are dropped then
            depends on the split of the batch, so results change with the number of ranks.
        balance_loss: The weight of the balance loss (Switch Transformers); 0 for none.
        balance_over: "batch" for all tokens of a batch together, or "sequence" for each sequence, which
            pipelines with several micro-batches require.
        z_loss: The weight of the router's z-loss (ST-MoE); 0 for none.
        bias_rate: The change of an expert's selection bias in an update (auxiliary-loss-free balancing, as
            in DeepSeek-V3); 0 for no such bias.
        bias_update_steps: The number of training batches per update: the optimizer's
            `gradient_accumulation_steps`.
        sequence_parallel: Whether input and output are this tensor rank's slice of dim 1.
        kernel_initializer: For the experts' first kernels.
        output_initializer: For their second kernels; None for the same.
        router_initializer: For the kernel of the router.
        **kwargs: As for `keras.layers.Layer`.

    Raises:
        ValueError: `num_experts` is not divisible by the size of the expert axis, or `hidden_dim` by that of
            the tensor axis.

    Sources: Shazeer et al. 2017, "Outrageously Large Neural Networks"; Fedus et al. 2021, "Switch
    Transformers"; Gale et al. 2022, "MegaBlocks" (no dropped tokens).
    """

    splits_tokens = False
    _arguments = ("kernel_initializer", "output_initializer", "router_initializer")

    def __init__(
        self,
        num_experts: int,
        hidden_dim: int,
        top_k: int = 2,
        *,
        activation: str = "swiglu",
        use_bias: bool = False,
        scores: str = "softmax",
        score_first: bool = True,
        normalize_gates: bool | None = None,
        gate_scale: float = 1.0,
        shared_hidden_dim: int | None = None,
        shared_gate: bool = False,
        capacity_factor: float | None = None,
        balance_loss: float = 0.01,
        balance_over: str = "batch",
        z_loss: float = 0.0,
        bias_rate: float = 0.0,
        bias_update_steps: int = 1,
        sequence_parallel: bool = False,
        kernel_initializer="glorot_uniform",
        output_initializer=None,
        router_initializer="glorot_uniform",
        **kwargs,
    ):
        super().__init__(
            use_bias=use_bias,
            sequence_parallel=sequence_parallel,
            kernel_initializer=kernel_initializer,
            output_initializer=output_initializer,
            **kwargs,
        )
        self.supports_masking = True
        self.num_experts = checks.integer("num_experts", num_experts, minimum=1)
        self.hidden_dim = checks.integer("hidden_dim", hidden_dim, minimum=1)
        self.top_k = checks.integer("top_k", top_k, minimum=1, maximum=num_experts)
        self._config: dict[str, Any] = {
            "num_experts": self.num_experts,
            "hidden_dim": self.hidden_dim,
            "top_k": self.top_k,
            "activation": checks.text("activation", activation),
            "use_bias": self.use_bias,
            "scores": checks.one_of("scores", scores, SCORES),
            "score_first": checks.boolean("score_first", score_first),
            "normalize_gates": checks.boolean(
                "normalize_gates", top_k > 1 if normalize_gates is None else normalize_gates
            ),
            "gate_scale": checks.number("gate_scale", gate_scale, above=0),
            "shared_hidden_dim": checks.integer(
                "shared_hidden_dim", shared_hidden_dim, minimum=1, optional=True
            ),
            "shared_gate": checks.boolean("shared_gate", shared_gate),
            "capacity_factor": checks.number(
                "capacity_factor", capacity_factor, above=0, optional=True
            ),
            "balance_loss": checks.number("balance_loss", balance_loss, minimum=0),
            "balance_over": checks.one_of("balance_over", balance_over, _BALANCE_OVER),
            "z_loss": checks.number("z_loss", z_loss, minimum=0),
            "bias_rate": checks.number("bias_rate", bias_rate, minimum=0),
            "bias_update_steps": checks.integer("bias_update_steps", bias_update_steps, minimum=1),
        }
        if shared_hidden_dim is not None and activation not in ACTIVATIONS:
            raise ValueError(
                'A shared network requires activation="swiglu" or "gelu". Received: '
                f"activation={activation!r}, shared_hidden_dim={shared_hidden_dim}."
            )
        self.router_initializer = initializer("router_initializer", router_initializer)
        self._expert_group = expert_group()
        check_experts(num_experts, self._expert_group, self)
        check_divides("hidden_dim", hidden_dim, self._group, self)
        self._networks = ExpertNetworks(self, activation)

    def build(self, input_shape):
        """Adds the router, this rank's experts, and the shared network."""
        config, width = self._config, input_shape[-1]
        self.router_kernel = self.add_weight(
            name="router_kernel",
            shape=(width, self.num_experts),
            dtype="float32",
            initializer=self.router_initializer,
            autocast=False,
        )
        self._networks.add_weights(self, width)
        if config["shared_hidden_dim"] is not None:
            self._build_shared(input_shape)
        rate, steps = config["bias_rate"], config["bias_update_steps"]
        self._bias_state = BiasState(self, self.num_experts, rate, steps) if rate else None
        self.expert_usage = ExpertUsage(self.num_experts)
        self.built = True

    def _build_shared(self, input_shape) -> None:
        config = self._config
        self.shared = self._product(
            ParallelMLP,
            config["shared_hidden_dim"],
            self.kernel_initializer,
            "shared",
            activation=config["activation"],
            output_initializer=self.output_initializer,
        )
        self.shared.build(input_shape)
        if config["shared_gate"]:
            self.shared_gate_kernel = self.add_weight(
                name="shared_gate_kernel",
                shape=(input_shape[-1], 1),
                initializer=self.router_initializer,
            )
            self._mark_partial(self.shared_gate_kernel)

    def call(self, inputs, mask=None, training=None):
        """Maps [batch, ..., width] to the same shape.

        Args:
            inputs: The tokens.
            mask: Which tokens are included in losses and counts: bool, [batch, ...]; None for all.
            training: Whether counts and bias are updated.

        Raises:
            ValueError: XLA compiles parts of the step.
        """
        check_sizes_may_change(f"the experts of `{self.name}`")
        split = self._group if self.sequence_parallel else None
        whole = to_router = inputs
        if split is not None:
            whole = all_gather(inputs, split, 1, name=self.name)
            # Every tensor rank computes the whole router, and the ranks' gradients are summed.
            to_router = _with_gradient_over(whole, split.size)
        width = inputs.shape[-1]
        tokens = tf.reshape(whole, [-1, width])
        routing = self._route(tf.reshape(to_router, [-1, width]))
        replica = current_replica()
        # Losses that a layer adds are not used in a prediction under a strategy.
        if training or replica is None or replica.step is not None:
            self._balance(routing, whole, mask, bool(training))
        y = self._outputs(tokens, routing, bool(training))
        y = tf.ensure_shape(tf.reshape(y, tf.shape(whole)), whole.shape)
        if self._group is not None:
            y = self._reduce(y, self._group, f"{self.name}/outputs")
        if self._config["shared_hidden_dim"] is None:
            return y
        return y + self._shared_outputs(inputs)

    def _route(self, tokens: tf.Tensor) -> Routing:
        config = self._config
        logits = tf.matmul(tf.cast(tokens, tf.float32), value_tensor(self.router_kernel))
        return route(
            logits,
            self.top_k,
            scores=config["scores"],
            score_first=config["score_first"],
            normalize=config["normalize_gates"],
            scale=config["gate_scale"],
            bias=None if self._bias_state is None else value_tensor(self._bias_state.bias),
        )

    def _outputs(self, tokens: tf.Tensor, routing: Routing, training: bool) -> tf.Tensor:
        """The experts' output for this rank's tokens, or a partial sum if hidden units are split."""
        factor, gates = self._config["capacity_factor"], routing.gates
        capacity = None
        if factor is not None:
            capacity = capacity_of(tf.shape(tokens)[0], self.top_k, self.num_experts, factor)
        # The number of rows of an expert depends on values.
        with excluded():
            permutation = sort_by_expert(
                routing.experts,
                self.num_experts,
                is_there=are_there(),
                capacity=capacity,
                gates=gates,
            )
        if training:
            self._count_usage(routing, permutation)
        if self._group is not None:
            if not self.sequence_parallel:
                tokens = copy_to_region(tokens, self._group, name=f"{self.name}/tokens")
            gates = copy_to_region(gates, self._group, name=f"{self.name}/gates")
        with excluded():
            return through_experts(
                tokens, gates, permutation, self._networks, self._expert_group, self.name
            )

    def _balance(self, routing: Routing, inputs: tf.Tensor, mask, training: bool) -> None:
        """Adds the losses, and updates the bias."""
        config, replica = self._config, current_replica()
        over_batch = config["balance_loss"] and config["balance_over"] == "batch"
        tokens = self._tokens(inputs, mask)
        if over_batch or (self._bias_state is not None and training):
            counts = count_choices(routing.experts, self.num_experts, tokens)
            if replica is not None:
                counts = all_reduce(counts, replica.gradient_group, name=f"{self.name}/load")
        if over_batch:
            loss = balance_loss(counts, routing.probabilities, tokens)
            self.add_loss(config["balance_loss"] * loss)
        elif config["balance_loss"]:
            rows = tf.shape(inputs)[0] if inputs.shape.rank > 2 else tf.constant(1)
            loss = balance_loss_of_sequences(routing.experts, routing.probabilities, tokens, rows)
            self.add_loss(config["balance_loss"] * loss)
        if config["z_loss"]:
            self.add_loss(config["z_loss"] * router_z_loss(routing.logits, tokens))
        if self._bias_state is not None and training:
            self._bias_state.update(tf.stop_gradient(counts))

    def _tokens(self, inputs: tf.Tensor, mask) -> Tokens:
        """The tokens of the inputs that are included in losses and counts."""
        there, sizes = are_there(), tf.shape(inputs)[:-1]
        with devices.on_host():
            number = tf.reduce_prod(sizes)
            counted = None if mask is None else tf.reshape(tf.cast(mask, tf.bool), [-1])
            if there is not None:
                counted = tf.fill([number], there) if counted is None else counted & there
            total = number if counted is None else tf.math.count_nonzero(counted)
            return Tokens(self.name, counted, mask is not None, tf.cast(total, tf.float32))

    def _count_usage(self, routing: Routing, permutation) -> None:
        with devices.on_host():
            chosen = count_by_expert(routing.experts, self.num_experts)
            there = are_there()
            if there is not None:
                chosen = tf.where(there, chosen, 0)
            dropped = tf.reduce_sum(chosen) - tf.reduce_sum(permutation.counts)
            self.expert_usage.add(chosen, dropped)

    def _shared_outputs(self, inputs: tf.Tensor) -> tf.Tensor:
        y = self.shared(inputs)
        if not self._config["shared_gate"]:
            return y
        return tf.sigmoid(tf.matmul(inputs, value_tensor(self.shared_gate_kernel))) * y

    @property
    def num_parameters(self) -> dict[str, int]:
        """The number of parameters in total, and of those that process a token ("active")."""
        of_experts = self._networks.num_parameters
        total = sum(math.prod(global_shape(weight)) for weight in self.trainable_variables)
        idle = of_experts - of_experts * self.top_k // self.num_experts
        return {"total": total, "active": total - idle}

    def get_config(self):
        """The configuration, which is the same on any mesh."""
        return {**super().get_config(), **self._config}


def _with_gradient_over(tensor: tf.Tensor, divisor: int) -> tf.Tensor:
    return custom_gradient(lambda x: (tf.identity(x), lambda dy: dy / divisor))(tensor)
