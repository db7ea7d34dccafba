"""GRPO: training on rewards of sampled answers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import keras_hub
import numpy as np
import tensorflow as tf

from tfdist.addons.hub.chat.answering import answers, prompt_ids
from tfdist.addons.hub.chat.tokenizer import ChatTokenizer
from tfdist.addons.hub.preferences.losses import GRPOLoss, Recorder
from tfdist.addons.hub.preferences.reference import (
    check_adapters,
    compile_without_metrics,
    log_probabilities,
    without_adapters,
)
from tfdist.collectives.objects import all_gather_object
from tfdist.step.context import strategy_of
from tfdist.utils import checks

#: How the losses of tokens are averaged, as TRL names it.
AVERAGES = ("dapo", "grpo", "dr_grpo")
_LEAST_DEVIATION = 1e-4

Messages = Sequence[Mapping[str, Any]]
#: From the messages of each prompt and the text of its answer to rewards.
Reward = Callable[[list[Messages], list[str]], Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Samples:
    """Answers to prompts, `group` of them one after the other for each.

    Attributes:
        ids: int32, [answers, length]: prompt, answer, padding.
        begins: The places of the first tokens of answers.
        ends: The places after their last tokens.
        texts: The answers.
        rewards: float32, [answers].
    """

    ids: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    texts: list[str]
    rewards: np.ndarray


class GRPO:
    """Samples answers of a model, and trains it on their rewards; every rank makes the same calls.

    ```python
    with strategy.scope():
        task = tfdist.load_preset("folder", preprocessor=None, compile=False)
        task.backbone.enable_lora(16)
    policy = GRPO(task, ChatTokenizer("folder"), reward, keras.optimizers.AdamW(1e-5), length=512)
    for prompts in batches_of_messages:
        print(policy.step(prompts))
    ```

    Ranks with whole weights sample answers to different prompts; others sample together. Sampling runs token by
    token: on CPUs it takes most of the time of a step.

    Args:
        model: A causal language model of KerasHub, or a `PipelineModel` of one.
        tokenizer: Its tokenizer, with a chat template.
        reward: A function of the messages of prompts and the texts of answers to finite numbers, the same on each
            rank.
        optimizer: The optimizer.
        length: The tokens of a row, with those of the prompt.
        group: The answers to a prompt; at least 2.
        average: "dapo": the mean over the tokens of all answers (Yu et al. 2025); "grpo": over the tokens of each
            answer, then over answers (Shao et al. 2024); "dr_grpo": the sum divided by the answers and by the most
            tokens of one (Liu et al. 2025, arXiv:2503.20783).
        scaled: Whether advantages are divided by the deviation of the rewards of a prompt.
        beta: The factor of the divergence from the model without its adapters; requires that only adapters are
            trained, unless it is 0.
        epsilon: As for `GRPOLoss`.
        epsilon_high: As for `GRPOLoss`.
        updates: The updates for each batch of answers.
        temperature: Of the sampling; log-probabilities are those of this distribution. With another one than 1 all
            logits of a batch are in memory.
        chunk_size: As for `VocabParallelCrossEntropy`.
        seed: Of the sampling.

    Raises:
        ValueError: An argument is invalid.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: ChatTokenizer,
        reward: Reward,
        optimizer: keras.optimizers.Optimizer,
        *,
        length: int,
        group: int = 8,
        average: str = "dapo",
        scaled: bool = True,
        beta: float = 0.0,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        updates: int = 1,
        temperature: float = 1.0,
        chunk_size: int | None = 1024,
        seed: int = 0,
    ):
        self._model = checks.instance("model", model, keras.Model, "a causal language model")
        self._tokenizer = checks.instance("tokenizer", tokenizer, ChatTokenizer, "a ChatTokenizer")
        self._reward = checks.function("reward", reward)
        checks.instance("optimizer", optimizer, keras.optimizers.Optimizer, "an optimizer of Keras")
        self._length = checks.integer("length", length, minimum=2)
        self._group = checks.integer("group", group, minimum=2)
        self._average = checks.one_of("average", average, AVERAGES)
        self._scaled = checks.boolean("scaled", scaled)
        self._updates = checks.integer("updates", updates, minimum=1)
        _ = tokenizer.needed_template
        self._strategy: Any = strategy_of(model)
        self._backbone = getattr(model, "chain_model", model).backbone
        if checks.number("beta", beta, minimum=0):
            check_adapters(self._backbone)
        replica, self._replicas = 0, 1
        if self._strategy is not None and self._strategy.zero_stage < 3:
            rows = self._strategy.row_group
            replica, self._replicas = rows.rank, rows.size
        self._replica = replica
        #: For a number of answers, which the graph that writes log-probabilities has.
        self._recorder: tuple[int, Recorder] | None = None
        sampler = keras_hub.samplers.RandomSampler(
            seed=checks.integer("seed", seed, minimum=0) + replica,
            temperature=checks.number("temperature", temperature, above=0),
        )
        with contextlib.nullcontext() if self._strategy is None else self._strategy.scope():
            self._loss = GRPOLoss(
                model.outputs[0].shape[-1],
                on_policy=updates == 1,
                beta=beta,
                epsilon=epsilon,
                epsilon_high=epsilon_high,
                temperature=temperature,
                chunk_size=chunk_size,
            )
            compile_without_metrics(model, optimizer=optimizer, loss=self._loss, sampler=sampler)

    def step(self, prompts: Sequence[Messages]) -> dict[str, float]:
        """Samples answers to prompts, and makes the updates.

        Args:
            prompts: Messages, the same on all ranks.

        Returns:
            The means of rewards, their deviations within prompts, tokens of answers, and the loss.

        Raises:
            ValueError: There are fewer prompts than ranks that sample, a prompt has too many tokens, or a reward is
                not finite.
        """
        found = self.sample(prompts)
        rewards = found.rewards.reshape(-1, self._group)
        deviations = rewards.std(axis=1, ddof=1, keepdims=True)
        advantages = rewards - rewards.mean(axis=1, keepdims=True)
        if self._scaled:
            advantages /= deviations + _LEAST_DEVIATION
        loss = self._update(found, advantages.reshape(-1).astype("float32"))
        return {
            "reward": float(rewards.mean()),
            "deviation": float(deviations.mean()),
            "tokens": float((found.ends - found.begins).mean()),
            "loss": loss,
        }

    def sample(self, prompts: Sequence[Messages]) -> Samples:
        """Answers to prompts, with their rewards; see `step`."""
        if len(prompts) < self._replicas:
            raise ValueError(
                f"A step requires a prompt for each of {self._replicas} ranks that sample. Received: "
                f"{len(prompts)} prompts."
            )
        for place, prompt in enumerate(prompts):  # On all ranks, so that all of them raise.
            try:
                prompt_ids(self._tokenizer, prompt, length=self._length)
            except ValueError as error:
                raise ValueError(f"Prompt {place} cannot be answered. Received: {error}") from error
        own = [
            answers(self._model, self._tokenizer, prompt, length=self._length, count=self._group)
            for prompt in prompts[self._replica :: self._replicas]
        ]
        every = [own]
        if self._replicas > 1:
            every = all_gather_object(own, self._strategy.row_group, name="grpo/samples")
        # By prompt, in the order of the prompts.
        parts = [
            every[place % self._replicas][place // self._replicas] for place in range(len(prompts))
        ]
        texts = [text for part in parts for text in part.texts]
        asked = [prompt for prompt in prompts for _ in range(self._group)]
        rewards = np.asarray(self._reward(asked, texts), "float32")
        if rewards.shape != (len(texts),) or not np.isfinite(rewards).all():
            raise ValueError(
                f"`reward` must return {len(texts)} finite numbers, one for each answer. Received: "
                f"{checks.shown(rewards.tolist())}."
            )
        return Samples(
            np.concatenate([part.ids for part in parts]),
            np.repeat([part.begin for part in parts], self._group),
            np.concatenate([part.ends for part in parts]),
            texts,
            rewards,
        )

    def _update(self, found: Samples, advantages: np.ndarray) -> float:
        count, length = found.ids.shape
        places = np.arange(length)
        # A token is the target of the place before it.
        inside = (places >= found.begins[:, None] - 1) & (places < found.ends[:, None] - 1)
        sizes = inside.sum(axis=1, keepdims=True)
        divisors = {"dapo": sizes.sum(), "grpo": sizes * count, "dr_grpo": count * (length - 1)}
        weights = inside / np.maximum(divisors[self._average], 1)
        targets = np.pad(found.ids[:, 1:], [(0, 0), (0, 1)])
        inputs = {
            "token_ids": found.ids,
            "padding_mask": (places < found.ends[:, None]).astype("int32"),
        }
        old = reference = np.zeros([count, length], "float32")
        if self._updates > 1:
            old = self._log_probabilities(inputs, targets, inside)
        if self._loss.beta:
            with without_adapters(self._backbone):
                reference = self._log_probabilities(inputs, targets, inside)
        row = np.broadcast_to(advantages[:, None], [count, length])
        labels = np.stack([targets, weights, row, old, reference], axis=-1).astype("float32")
        history = self._model.fit(
            inputs, labels, batch_size=count, epochs=self._updates, shuffle=False, verbose=0
        )
        return float(history.history["loss"][-1])

    def _log_probabilities(
        self, inputs: dict, targets: np.ndarray, inside: np.ndarray
    ) -> np.ndarray:
        count, length = targets.shape
        numbers = np.broadcast_to(np.arange(count)[:, None], targets.shape)
        rest = np.zeros_like(targets)
        labels = np.stack([targets, inside, rest, rest, rest, numbers], axis=-1).astype("float32")
        data = tf.data.Dataset.from_tensor_slices((inputs, labels))
        data = data.batch(count, drop_remainder=True)
        if self._recorder is None or self._recorder[0] != count:
            self._recorder = count, Recorder(count, length)
            self._model.make_test_function(force=True)
        return log_probabilities(self._model, data, self._recorder[1], self._loss)
