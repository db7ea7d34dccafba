"""Small language models trained on pairs and on rewards, on ranks and in one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tests.tensor_parallel.families import causal_lm, scope, whole

LENGTH, WORDS = 12, 17
STEPS, PAIRS = 3, 4
#: The lengths of the prompt, and of the chosen and the rejected answer.
SIZES = [(3, 4, 2), (2, 5, 8), (4, 1, 3), (1, 9, 6)]


def pairs():
    """Token rows of pairs."""
    from tfdist.addons.hub.chat.rows import Row

    random = np.random.default_rng(3)
    found = []
    for number, (prompt, *answers) in enumerate(SIZES):
        first = random.integers(1, WORDS, prompt).tolist()
        rows = []
        for size in answers:
            ids = (*first, *random.integers(1, WORDS, size).tolist())
            trained = tuple(place >= prompt for place in range(len(ids)))
            rows.append(Row(ids, trained, f"file:{number}"))
        found.append(tuple(rows))
    return found


def split(task, mesh: dict, lora: bool, length: int):
    """The model to train of a task, with adapters and split if that is asked for."""
    import tfdist

    if lora:
        task.backbone.enable_lora(2)
        tfdist.addons.hub.train_only_adapters(task)
    if mesh.get("tensor", 1) > 1:
        tfdist.parallelize(task)
    if mesh.get("pipeline", 1) > 1:
        return tfdist.pipeline.PipelineModel(task, num_microbatches=2, input_shape=(length,))
    return task


def build(name: str, mesh: dict, lora: bool):
    keras.utils.set_random_seed(5)
    task = causal_lm(name, 2, length=LENGTH, compiled=False)
    for place, variable in enumerate(task.trainable_variables):
        values = np.random.default_rng(place).normal(0, 0.3, variable.shape)
        variable.assign(values + ("scale" in variable.name or "gamma" in variable.name))
    return task, split(task, mesh, lora, LENGTH)


def train(name: str, options: dict | None, kind: str, lora: bool = False, **arguments):
    """Losses, weights, and log-probabilities by the reference and at the end."""
    from tfdist.addons.hub.preferences.data import Pairs
    from tfdist.launch.finetune.preferences import PreferenceOptions

    keras.backend.clear_session()
    mesh = (options or {}).get("mesh", {})
    with scope(options):
        task, model = build(name, mesh, lora)
    given = PreferenceOptions(preference=kind, **arguments)
    found = Pairs.of(pairs(), LENGTH)
    rows = 2 * PAIRS
    found = given.referenced(found, model, task.backbone, rows=rows, chunk_size=5)
    ranks = 1 if options is None else model.distribute_strategy.row_group.size
    with scope(None) if options is None else model.distribute_strategy.scope():
        # That of IPO has gradients that are many times larger.
        rate = 0.005 if kind == "ipo" else 0.05
        loss = given.loss(WORDS, 5)
        model.compile(keras.optimizers.SGD(rate), loss, weighted_metrics=None)
    history = model.fit(found.batches(PAIRS, ranks=ranks), epochs=STEPS, shuffle=False, verbose=0)
    agreement = given.agreement(found, model, rows=rows, chunk_size=5)
    return history.history["loss"], whole(task.trainable_variables), found.references, agreement


def by_formula(name: str, kind: str, beta: float = 0.1, label_smoothing: float = 0.0):
    """The first loss, from all logits in float64, and the log-probabilities of answers."""
    keras.backend.clear_session()
    task, _ = build(name, {}, False)
    found_sums, found_means, likelihoods, tokens = [], [], [], 0
    for pair in pairs():
        for place, row in enumerate(pair):
            ids = np.array([row.ids], "int32")
            logits = np.asarray(
                task({"token_ids": ids, "padding_mask": np.ones_like(ids)}), "float64"
            )[0]
            shifted = logits - logits.max(-1, keepdims=True)
            log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
            each = log_p[np.arange(len(row) - 1), list(row.ids[1:])]
            inside = np.array(row.trained[1:])
            found_sums.append(each[inside].sum())
            found_means.append(each[inside].mean())
            if place == 0:
                likelihoods.append(each.sum())
                tokens += len(each)
    sums, means = np.reshape(found_sums, [-1, 2]), np.reshape(found_means, [-1, 2])
    if kind == "orpo":
        odds = means[:, 0] - means[:, 1]
        odds -= np.log1p(-np.exp(means[:, 0])) - np.log1p(-np.exp(means[:, 1]))
        loss = -sum(likelihoods) / tokens - beta * np.mean(np.log(1 / (1 + np.exp(-odds))))
    elif kind == "ipo":
        loss = (1 / (2 * beta)) ** 2
    else:
        # The model is its own reference.
        loss = np.log(2)
    return loss, sums


def written_tokenizer(folder: str):
    """A tokenizer with a chat template, in a folder."""
    from tests.addons.hub.chat.templates import TEMPLATES
    from tfdist.addons.hub.chat.tokenizer import ChatTokenizer

    place = Path(folder) / str(os.getpid())
    place.mkdir(exist_ok=True)
    source = Path(__file__).parents[1] / "chat" / "tokenizer.json"
    (place / "tokenizer.json").write_bytes(source.read_bytes())
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTokenizer(place, TEMPLATES["chatml"])


PROMPTS = [[{"role": "user", "content": text}] for text in ("a", "be", "see", "it")]


def reward(prompts, answers) -> list[float]:
    """The share of letters that are an e, and a point for a text that the prompt begins."""
    return [
        text.count("e") / max(len(text), 1) + text.startswith(prompt[0]["content"])
        for prompt, text in zip(prompts, answers, strict=True)
    ]


def rewarded(folder: str, options: dict | None, steps: int = 3, lora: bool = False, **arguments):
    """What steps of GRPO report, and the weights."""
    from tfdist.addons.hub.preferences.grpo import GRPO

    tokenizer = written_tokenizer(folder)
    mesh = (options or {}).get("mesh", {})
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    with scope(options):
        task = causal_lm("Llama3", 2, length=32, compiled=False, vocabulary_size=320)
        model = split(task, mesh, lora, 32)
    sizes = {"length": 32, "group": 4, "chunk_size": 16, **arguments}
    policy = GRPO(model, tokenizer, reward, keras.optimizers.Adam(0.02), **sizes)
    found = [policy.step(PROMPTS) for _ in range(steps)]
    return found, whole(task.trainable_variables)


def policy_of(folder: str, options: dict | None, **arguments):
    from tfdist.addons.hub.preferences.grpo import GRPO

    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    with scope(options):
        task = causal_lm("Llama3", 2, length=32, compiled=False, vocabulary_size=320)
    sizes = {"length": 32, "group": 2, "chunk_size": 16, **arguments}
    return GRPO(task, written_tokenizer(folder), reward, keras.optimizers.Adam(0.02), **sizes)


def of_counts(folder: str, counts: list[int], **arguments) -> list[float]:
    """The losses of steps with so many prompts."""
    policy = policy_of(folder, None, **arguments)
    return [policy.step(PROMPTS[:count])["loss"] for count in counts]


def with_a_long_prompt(folder: str) -> str:
    policy = policy_of(folder, {})
    try:
        policy.step([PROMPTS[0], [{"role": "user", "content": "long " * 40}]])
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def evaluated(kind: str, ranks: list[int]) -> list[float]:
    """The loss of five pairs in a batch, which is completed for some ranks."""
    from tfdist.addons.hub.preferences.data import Pairs
    from tfdist.launch.finetune.preferences import PreferenceOptions

    keras.backend.clear_session()
    _, model = build("Llama3", {}, False)
    given = PreferenceOptions(preference=kind)
    found = Pairs.of([*pairs(), pairs()[1]], LENGTH)
    model.compile(loss=given.loss(WORDS, 5), weighted_metrics=None)
    return [model.evaluate(found.batches(12, ranks=each), verbose=0) for each in ranks]


def as_trl(golden: str, folder: str, options: dict | None, kind: str, steps: int, rate: float):
    """Losses, and means of the log-probabilities of answers, by step: on the model and the pairs of TRL."""
    import tfdist
    from tfdist.addons.hub.chat.rows import Row
    from tfdist.addons.hub.preferences.data import Pairs
    from tfdist.launch.finetune import preferences

    found = json.loads(str(np.load(golden)["pairs"]))

    def row(pair, name: str) -> Row:
        prompt, answer = pair["prompt"], pair[name]
        trained = (False,) * len(prompt) + (True,) * len(answer)
        return Row((*prompt, *answer), trained, "golden")

    rows = [(row(pair, "chosen"), row(pair, "rejected")) for pair in found]
    length = max(len(row) for pair in rows for row in pair)
    mesh = (options or {}).get("mesh", {})
    keras.backend.clear_session()
    with scope(options):
        task = tfdist.load_preset(folder, preprocessor=None, compile=False, dtype="float32")
        mesh = {name: size for name, size in mesh.items() if name != "tensor"}  # It is split.
        model = split(task, mesh, False, length)
    smoothing: dict[str, Any] = (
        {"label_smoothing": 0.1} if kind in ("conservative", "robust") else {}
    )
    given = preferences.PreferenceOptions(preference=kind, **smoothing)
    pairs = Pairs.of(rows, length)
    count = len(rows)
    pairs = given.referenced(pairs, model, task.backbone, rows=2 * count, chunk_size=7)
    losses, means = [], []
    for _ in range(steps):
        log_p = preferences._log_probabilities(pairs, model, 2 * count, 7)
        if kind == "orpo":
            log_p = log_p / pairs.trained.sum(-1)
        means.append(log_p.mean(axis=0))
        with model.distribute_strategy.scope():
            loss = given.loss(task.output.shape[-1], 7)
            model.compile(keras.optimizers.SGD(rate), loss, weighted_metrics=None)
        ranks = getattr(model.distribute_strategy, "row_group", None)
        data = pairs.batches(count, ranks=1 if ranks is None else ranks.size)
        losses += model.fit(data, verbose=0).history["loss"]
    return losses, np.array(means)
