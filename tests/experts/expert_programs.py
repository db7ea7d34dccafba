"""Programs with layers of experts, and the dense loop that they are compared with."""

from __future__ import annotations

import functools

import keras
import numpy as np
import tensorflow as tf

from tests.strategies import programs
from tests.strategies.programs import scope, start
from tfdist.experts import MixtureOfExperts
from tfdist.experts.balancing import BiasState

EXPERTS, WIDTH, HIDDEN, TOKENS = 4, 8, 12, 6


@keras.saving.register_keras_serializable(package="tests")
class DenseLoop(MixtureOfExperts):
    """Every expert computes every token, in one process; router and losses by their definitions."""

    def call(self, inputs, mask=None, training=None):
        config, experts, top_k = self._config, self.num_experts, self.top_k
        tokens = tf.reshape(inputs, [-1, inputs.shape[-1]])
        logits = tf.matmul(tokens, self.router_kernel.value)
        score = tf.sigmoid if config["scores"] == "sigmoid" else tf.nn.softmax
        scores = score(logits)
        choice = scores if config["score_first"] else logits
        if config["bias_rate"]:
            choice = choice + self._state().bias.value
        _, chosen = tf.math.top_k(choice, top_k)
        is_chosen = tf.reduce_sum(tf.one_hot(chosen, experts), axis=1)
        if config["score_first"]:
            gates = scores * is_chosen
        else:
            gates = score(tf.where(is_chosen > 0, logits, -1e30))
        if config["normalize_gates"]:
            gates /= tf.reduce_sum(gates, axis=-1, keepdims=True)
        gates *= config["gate_scale"]
        weights = {
            weight.name: weight.value
            for weight in self.trainable_variables
            if "/shared/" not in weight.path
        }
        total = tf.zeros_like(tokens)
        for number in range(experts):
            total += gates[:, number, None] * self._expert(tokens, number, weights)
        probabilities = scores / tf.reduce_sum(scores, axis=-1, keepdims=True)
        per = [1, -1] if config["balance_over"] == "batch" else [tf.shape(inputs)[0], -1]
        loads = tf.reduce_mean(tf.reshape(is_chosen / top_k, [*per, experts]), axis=1)
        means = tf.reduce_mean(tf.reshape(probabilities, [*per, experts]), axis=1)
        balance = experts * tf.reduce_mean(tf.reduce_sum(loads * means, axis=-1))
        self.add_loss(config["balance_loss"] * balance)
        z = tf.reduce_mean(tf.square(tf.reduce_logsumexp(logits, axis=-1)))
        self.add_loss(config["z_loss"] * z)
        if training and config["bias_rate"]:
            self._state().update(tf.reduce_sum(is_chosen, axis=0))
        outputs = tf.reshape(total, tf.shape(inputs))
        if config["shared_hidden_dim"] is not None:
            shared = self.shared(inputs)
            if config["shared_gate"]:
                shared *= tf.sigmoid(tf.matmul(inputs, self.shared_gate_kernel.value))
            outputs += shared
        return outputs

    def _state(self) -> BiasState:
        if self._bias_state is None:
            raise ValueError("This layer has no bias.")
        return self._bias_state

    def _expert(self, tokens, number: int, weights):
        def product(x, name):
            y = tf.matmul(x, weights[f"{name}_kernel"][number])
            return y + weights[f"{name}_bias"][number] if self._config["use_bias"] else y

        if self._config["activation"] == "swiglu":
            hidden = tf.nn.silu(product(tokens, "gate")) * product(tokens, "up")
        else:
            hidden = tf.nn.gelu(product(tokens, "hidden"), approximate=True)
        return product(hidden, "output")


def data(rows: int, same: bool = False):
    """Rows of tokens and their classes; all tokens alike but for noise, where they are to go one way."""
    chance = np.random.default_rng(0)
    x = chance.normal(size=(rows, TOKENS, WIDTH)).astype("float32")
    if same:
        x = 0.01 * x + 1.0
    return x, chance.integers(0, 3, (rows, TOKENS))


def build(strategy, *, micro_batches: int | None = None, recomputed: bool = False, **options):
    kind = DenseLoop if strategy is None else MixtureOfExperts
    options = {"num_experts": EXPERTS, "hidden_dim": HIDDEN, "z_loss": 0.01, **options}
    inputs = keras.Input((TOKENS, WIDTH))
    x = keras.layers.Dense(WIDTH, activation="tanh", name="first")(inputs)
    x = keras.layers.LayerNormalization(name="norm")(x)
    experts = kind(name="experts", **options)
    x = keras.layers.Add()([x, experts(x)])
    x = keras.layers.LayerNormalization(name="between")(x)
    more = kind(name="more_experts", **options)
    x = more(x)
    model = keras.Model(inputs, keras.layers.Dense(3, name="last")(x))
    if strategy is None:
        return model
    if recomputed:
        from tfdist.recompute import recompute

        recompute(experts)
        recompute(more)
    if micro_batches is not None:
        from tfdist.pipeline import PipelineModel

        model = PipelineModel(model, num_microbatches=micro_batches)
    return model


def train(
    strategy,
    *,
    rows: int = 11,
    batch: int = 5,
    epochs: int = 7,
    rate: float = 0.1,
    same: bool = False,
    accumulate: int | None = None,
    optimizer: str = "sgd",
    biases_only: bool = False,
    **options,
):
    """Twenty steps of SGD; the logs, and all weights of the whole model."""
    start()
    x, y = data(rows, same)
    with scope(strategy):
        model = build(strategy, **options)
        rule = keras.optimizers.get(optimizer)
        config = {
            **rule.get_config(),
            "learning_rate": rate,
            "gradient_accumulation_steps": accumulate,
        }
        model.compile(
            type(rule).from_config(config), programs.cross_entropy(), metrics=["accuracy"]
        )
    history = model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0).history
    if biases_only:
        biases = [np.array(w) for w in model.weights if w.name == "expert_bias"]
        model.evaluate(x, y, batch_size=batch, verbose=0)
        after = [np.array(w) for w in model.weights if w.name == "expert_bias"]
        return history, [biases, after]
    history["evaluation"] = model.evaluate(x, y, batch_size=batch, verbose=0)
    return history, whole_weights(model, strategy)


def whole_weights(model, strategy) -> list[np.ndarray]:
    if strategy is None:
        return [np.asarray(weight) for weight in model.weights]
    from tfdist.sharding import whole_value

    if not hasattr(model, "chain_model"):
        return [whole_value(weight).numpy() for weight in model.weights]
    from tfdist.collectives.objects import all_gather_object

    own = {weight.path: whole_value(weight).numpy() for weight in model.weights}
    every: dict[str, np.ndarray] = {}
    for found in all_gather_object(own, strategy.group()):
        every |= found
    return [every[weight.path] for weight in model.chain_model.weights]


def program(**options):
    return functools.partial(train, **options)
