"""Text generation by a language model, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist import layers
from tfdist.utils import checks


def generate(
    model: keras.Model,
    prompt_tokens: Sequence | np.ndarray,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    max_length: int | None = None,
) -> np.ndarray:
    """Continues a prompt, or several of the same length, token by token.

    ```python
    tokens = tfdist.models.generate(model, list(b"The assert statement"), 100, temperature=0.8)
    print(bytes(tokens.tolist()).decode(errors="replace"))
    ```

    Each token is drawn from softmax(logits / temperature) of the window before it, which the
    model computes again for each token: there is no cache of keys and values. On a mesh every rank
    calls this with the same arguments, and gets the same tokens.

    Args:
        model: A causal functional model from int32 ids [batch, time] to logits
            [batch, time, vocabulary], such as `tfdist.models.gpt`.
        prompt_tokens: Integers of shape [time] or [batch, time], with at least one token each.
        num_tokens: The number of tokens to add.
        temperature: Below 1 prefers likely tokens more than the model does; 0 always chooses the most
            likely one.
        top_k: The number of the most likely tokens from which one is drawn; None for all.
        seed: The seed of the draws.
        max_length: The longest window for the model: the last tokens of a longer text. None for the
            number of the model's positions, or the whole text.

    Returns:
        The prompt and the new tokens, int32 of shape [time + num_tokens], or
        [batch, time + num_tokens].

    Raises:
        ValueError: An argument is out of range, or a token is not in the vocabulary.

    Source: Fan et al. 2018, "Hierarchical Neural Story Generation" (top-k sampling).
    """
    checks.instance("model", model, keras.Model, "a Keras model")
    num_tokens = checks.integer("num_tokens", num_tokens, minimum=0)
    temperature = checks.number("temperature", temperature, minimum=0)
    top_k = checks.integer("top_k", top_k, minimum=1, optional=True, also="None for all tokens")
    seed = checks.integer("seed", seed, minimum=0, maximum=2**64 - 1)
    max_length = checks.integer("max_length", max_length, minimum=1, optional=True)
    _check_model(model)
    prompts = _check_prompts(prompt_tokens, model.outputs[0].shape[-1])
    length = prompts.shape[1]
    fixed = model.inputs[0].shape[1]  # Known if a model splits its sequence.
    limits = [length + num_tokens, fixed, max_length, _num_positions(model)]
    seen = min(limit for limit in limits if limit is not None)
    window = fixed or seen

    @tf.function(autograph=False)
    def logits_after(tokens, last):
        logits = model(tokens, training=False)
        return tf.cast(tf.gather(logits, last, axis=1), tf.float32)

    # The window has a fixed size, so that there is one graph. Later tokens are zeros, which a
    # causal model ignores.
    texts = np.zeros((len(prompts), length + num_tokens + window), np.int32)
    texts[:, :length] = prompts
    random = np.random.default_rng(seed)
    for end in range(length, length + num_tokens):
        start = max(end - seen, 0)
        tokens = tf.constant(texts[:, start : start + window])
        logits = logits_after(tokens, tf.constant(end - start - 1)).numpy()
        texts[:, end] = _draw(logits, random, temperature, top_k)
    texts = texts[:, : length + num_tokens]
    return texts[0] if np.ndim(prompt_tokens) == 1 else texts


def _draw(logits, random: np.random.Generator, temperature: float, top_k: int | None):
    """A token for each row of logits [batch, vocabulary]."""
    if temperature == 0.0:
        return np.argmax(logits, axis=-1)
    # In float64, so that the draws depend as little as possible on the logits' rounding.
    logits = logits.astype(np.float64) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        others = np.argpartition(logits, -top_k, axis=-1)[:, :-top_k]
        np.put_along_axis(logits, others, -np.inf, axis=-1)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    totals = np.cumsum(weights, axis=-1)
    drawn = random.random((len(logits), 1)) * totals[:, -1:]
    return np.sum(totals <= drawn, axis=-1)


def _num_positions(model: keras.Model) -> int | None:
    """The longest sequence of the model; None if it has no limit."""
    lengths = [
        layer.max_length for layer in model.layers if isinstance(layer, layers.PositionEmbedding)
    ]
    return min(lengths, default=None)


def _check_model(model: keras.Model) -> None:
    inputs, outputs = getattr(model, "inputs", None) or (), getattr(model, "outputs", None) or ()
    ranks = [len(tensor.shape) for tensor in (*inputs, *outputs)]
    if ranks != [2, 3]:
        raise ValueError(
            "`model` must be a functional model from ids [batch, time] to logits [batch, time, "
            f"vocabulary]. Received: {model.name!r}, with "
            f"{[tuple(t.shape) for t in inputs]} to {[tuple(t.shape) for t in outputs]}."
        )


def _check_prompts(prompt_tokens, vocabulary_size: int) -> np.ndarray:
    """The prompts as an array of shape [batch, time]."""
    given = f"Received: prompt_tokens={checks.shown(prompt_tokens)}"
    meaning = "integers of shape [time] or [batch, time], with at least one token"
    try:
        prompts = np.atleast_2d(np.asarray(prompt_tokens))
    except (ValueError, TypeError) as error:
        raise ValueError(f"`prompt_tokens` must be {meaning}. {given}.") from error
    if prompts.ndim != 2 or not prompts.size or not np.issubdtype(prompts.dtype, np.integer):
        raise ValueError(
            f"`prompt_tokens` must be {meaning}. {given}, {prompts.dtype} of shape {prompts.shape}."
        )
    if prompts.min() < 0 or prompts.max() >= vocabulary_size:
        raise ValueError(
            f"`prompt_tokens` must be in the vocabulary, [0, {vocabulary_size}). {given}, tokens from "
            f"{prompts.min()} to {prompts.max()}."
        )
    return prompts
