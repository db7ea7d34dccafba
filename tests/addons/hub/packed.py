"""KerasHub's families on rows of several conversations, and with each in a row of its own."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.tensor_parallel.families import causal_lm, scope, whole
from tfdist.tensor_parallel import blockwise

__all__ = ["FAMILIES", "gradients", "logits", "train"]

#: Those whose decoders were tested, by the name of the family.
FAMILIES = [
    *("GPT2", "OPT", "Bloom", "Falcon", "Llama", "Llama3", "Mistral", "Phi3", "GPTNeoX"),
    *("Gemma", "Gemma2", "Gemma3", "Qwen", "Qwen3", "Mixtral", "QwenMoe", "Qwen3Moe"),
]
LENGTH, WORDS = 16, 17
#: The lengths of conversations, and of the prompts that are not trained.
SIZES = [(7, 2), (4, 1), (12, 5), (16, 3), (3, 1), (9, 8), (5, 2)]
FEW = blockwise._FEW


def rows():
    """Conversations as token rows."""
    from tfdist.addons.hub.chat.rows import Row

    random = np.random.default_rng(0)
    return [
        Row(
            tuple(random.integers(1, WORDS, size).tolist()),
            tuple(place >= prompt for place in range(size)),
            f"file:{number}",
        )
        for number, (size, prompt) in enumerate(SIZES)
    ]


def build(name: str, packed: bool, in_blocks: bool, tensor: int = 2):
    """The task, and the model to train."""
    import keras_hub

    from tfdist.addons.hub.documents import separate_documents

    keras.utils.set_random_seed(5)
    blockwise._FEW = 0 if in_blocks else FEW
    if name == "GPTNeoX":
        sizes = {
            "rotary_percentage": 0.5,
            "max_sequence_length": LENGTH,
            "num_layers": 2,
            "num_heads": 4,
            "hidden_dim": 16,
            "intermediate_dim": 16,
        }
        backbone = keras_hub.models.GPTNeoXBackbone(WORDS, **sizes)
        task = keras_hub.models.GPTNeoXCausalLM(backbone=backbone, preprocessor=None, compile=False)
    else:
        task = causal_lm(name, tensor, length=LENGTH, compiled=False)
    for place, variable in enumerate(task.trainable_variables):
        # Larger than initial ones, so that attention is not even.
        values = np.random.default_rng(place).normal(0, 0.3, variable.shape)
        variable.assign(values + ("scale" in variable.name or "gamma" in variable.name))
    return task, (separate_documents(task) if packed else task)


def batch(packed: bool):
    """All conversations as one batch: inputs, targets and weights."""
    from tfdist.addons.hub.chat.data import chat_batches

    data = rows()
    size = 4 if packed else len(data)
    found = chat_batches(data, size, length=LENGTH, packing=packed)
    assert found.steps == 1
    return next(iter(found.dataset)), size


def gradients(name: str, packed: bool, in_blocks: bool = False):
    """The loss of all conversations, and its gradients, by path."""
    keras.backend.clear_session()
    task, model = build(name, packed, in_blocks)
    (x, y, weights), _ = batch(packed)

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            logits = model(x, training=False)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, tf.cast(logits, tf.float32))
            loss = tf.reduce_sum(losses * weights)
        return loss, tape.gradient(loss, [v.value for v in task.trainable_variables])

    loss, found = step()
    found = [tf.convert_to_tensor(each).numpy() for each in found]
    return float(loss), dict(zip((v.path for v in task.trainable_variables), found, strict=True))


def logits(name: str, changed: bool, in_blocks: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Logits of packed rows, with the first conversation of each changed; and which tokens are of others."""
    keras.backend.clear_session()
    _, model = build(name, True, in_blocks)
    (x, _, _), _ = batch(True)
    first = x["padding_mask"].numpy() == 1
    if changed:
        ids = x["token_ids"].numpy()
        x["token_ids"] = tf.constant(np.where(first, ids % (WORDS - 1) + 1, ids))
    found = tf.function(lambda: model(x, training=False), autograph=False)()
    return found.numpy(), (x["padding_mask"].numpy() > 1)


def train(
    name: str,
    options: dict | None,
    packed: bool,
    *,
    lora: bool = False,
    in_blocks: bool = False,
    steps: int = 3,
):
    """Losses and weights of some steps on all conversations."""
    import tfdist
    from tfdist.layers import VocabParallelCrossEntropy

    keras.backend.clear_session()
    mesh = (options or {}).get("mesh", {})
    with scope(options):
        task, model = build(name, packed, in_blocks)
        if lora:
            task.backbone.enable_lora(2)
        if mesh.get("tensor", 1) > 1:
            tfdist.parallelize(task)
        if mesh.get("pipeline", 1) > 1:
            model = tfdist.pipeline.PipelineModel(model, num_microbatches=2, input_shape=(LENGTH,))
        loss = VocabParallelCrossEntropy(WORDS, reduction="sum", chunk_size=8)
        model.compile(keras.optimizers.SGD(0.01), loss, weighted_metrics=None)
    (x, y, weights), size = batch(packed)
    history = model.fit(
        x, y, sample_weight=weights, batch_size=size, epochs=steps, shuffle=False, verbose=0
    )
    return history.history["loss"], whole(task.trainable_variables)
