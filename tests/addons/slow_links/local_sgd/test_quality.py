"""What local steps cost: a language model of bytes by DiLoCo beside synchronous training."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks

LENGTH, BATCH, STEPS, WARMUP = 32, 16, 2000, 200


def language_model(sync_every: int) -> tuple[float, float]:
    """The validation loss after `STEPS` steps, and before the first."""
    import keras

    import tfdist
    from tfdist.testing import strategy

    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    text = corpus()
    windows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    windows = np.random.default_rng(0).permutation(windows)
    held_out, windows = windows[:512], windows[512:]
    windows = np.concatenate([windows] * 3)[: STEPS * BATCH]
    assert len(windows) == STEPS * BATCH
    with strategy().scope():
        model = tfdist.models.gpt(256, num_layers=2, width=48, num_heads=4, max_length=LENGTH)
        schedule = keras.optimizers.schedules.CosineDecay(
            0.0, STEPS - WARMUP, alpha=0.1, warmup_target=6e-3, warmup_steps=WARMUP
        )
        optimizer = keras.optimizers.AdamW(schedule, global_clipnorm=1.0)
        if sync_every:
            # With few steps between syncs, the paper's momentum of 0.9 is far too much.
            optimizer = tfdist.addons.slow_links.DiLoCo(optimizer, sync_every, outer_momentum=0.5)
        model.compile(optimizer, tfdist.layers.VocabParallelCrossEntropy(256))
    before = model.evaluate(held_out[:, :-1], held_out[:, 1:], batch_size=64, verbose=0)
    data = tf.data.Dataset.from_tensor_slices((windows[:, :-1], windows[:, 1:]))
    model.fit(data.batch(BATCH, drop_remainder=True), verbose=0)
    after = model.evaluate(held_out[:, :-1], held_out[:, 1:], batch_size=64, verbose=0)
    return float(after), float(before)


def corpus() -> np.ndarray:
    """The Python language reference, which Python carries."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return np.frombuffer(text.encode(), np.uint8).astype("int32")


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_diloco_is_near_synchronous_training_at_equal_tokens(pool):
    (common, before), *_ = pool.run(language_model, 0, timeout=600)
    (local, _), *_ = pool.run(language_model, 20, timeout=600)
    print(f"synchronous {common:.4f}, DiLoCo of 20 steps {local:.4f}, untrained {before:.4f}")
    assert common < 0.35 * before
    assert local < 1.03 * common
