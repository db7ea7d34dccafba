"""Generation, on one process and on a tensor axis of two."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest

from tests.conftest import on_ranks
from tfdist import models

#: Two ranks hold 30 tokens each, one of them padding.
VOCABULARY, LENGTH = 59, 16
PROMPT = (7, 22, 8)
#: What one process wrote, for both tests that compare with it.
_single: dict[str, np.ndarray] = {}


def build(**options):
    sizes = {"num_layers": 2, "width": 32, "num_heads": 4, "max_length": LENGTH}
    return models.gpt(VOCABULARY, **{**sizes, **options})


def trained(**options):
    """A model that has seen 3 * token + 1 follow most tokens."""
    from tfdist import layers

    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCABULARY, (320, LENGTH + 1)).astype("int32")
    for place in range(LENGTH):
        follows = (tokens[:, place] * 3 + 1) % VOCABULARY
        sure = random.random(len(tokens)) < 0.9
        tokens[:, place + 1] = np.where(sure, follows, tokens[:, place + 1])
    keras.utils.set_random_seed(1)
    model = build(**options)
    optimizer = keras.optimizers.Adam(1e-2, global_clipnorm=1.0)
    model.compile(optimizer, layers.VocabParallelCrossEntropy(VOCABULARY))
    model.fit(tokens[:, :-1], tokens[:, 1:], batch_size=16, epochs=2, verbose=0, shuffle=False)
    return model


def written(mesh: dict | None, **options) -> dict[str, np.ndarray]:
    """What a trained model writes on this rank, in several ways."""
    from tfdist import Mesh
    from tfdist.testing import strategy

    keras.backend.clear_session()
    with contextlib.nullcontext() if mesh is None else strategy(Mesh(**mesh)).scope():
        model = trained(**options)
    two = [PROMPT, PROMPT[::-1]]
    return {
        "greedy": models.generate(model, PROMPT, 30, temperature=0.0),
        "greedy of two": models.generate(model, two, 30, temperature=0.0),
        "top 3": models.generate(model, PROMPT, 30, top_k=3, seed=5),
        # So hot that all tokens are as likely as each other.
        "hot": models.generate(model, [PROMPT] * 200, 3, temperature=1e6, seed=5)[:, 3:],
    }


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    "sequence_parallel",
    [pytest.param(False, id="whole"), pytest.param(True, id="sequence")],
)
def test_two_tensor_ranks_write_what_one_process_writes(pool, one_process, sequence_parallel):
    if not _single:
        _single.update(one_process.run(written, None, timeout=200)[0])
    right = _single
    ranks = pool.run(
        written, {"data": 1, "tensor": 2}, sequence_parallel=sequence_parallel, timeout=200
    )
    for found in ranks:
        for way, tokens in right.items():
            np.testing.assert_array_equal(found[way], tokens, err_msg=way)
        # The padding behind the last token is never drawn, and all that is not padding is.
        assert set(found["hot"].ravel().tolist()) == set(range(VOCABULARY))
    greedy = right["greedy"]
    assert greedy.dtype == np.int32 and greedy.shape == (33,)
    np.testing.assert_array_equal(greedy[:3], PROMPT)
    assert np.mean(greedy[3:] == (greedy[2:-1] * 3 + 1) % VOCABULARY) > 0.6
    np.testing.assert_array_equal(right["greedy of two"][0], greedy)


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(2)
    return build(tied_head=False)


def test_seeds(model):
    def draw(seed):
        return models.generate(model, PROMPT, 20, seed=seed).tolist()

    assert draw(1) == draw(1) != draw(2)


def test_the_window_is_what_the_model_has_positions_for(model):
    tokens = models.generate(model, PROMPT, 2 * LENGTH, temperature=0.0)
    for end in range(len(PROMPT), len(tokens)):
        logits = model(tokens[None, max(end - LENGTH, 0) : end])[0, -1].numpy()
        assert logits[tokens[end]] >= logits.max() - 1e-5


def test_top_k_of_one_is_greedy(model):
    greedy = models.generate(model, PROMPT, 20, temperature=0.0)
    np.testing.assert_array_equal(models.generate(model, PROMPT, 20, top_k=1, seed=9), greedy)
    every = models.generate(model, PROMPT, 20, seed=9)
    np.testing.assert_array_equal(models.generate(model, PROMPT, 20, top_k=99, seed=9), every)


def test_top_k_draws_from_the_most_likely(model):
    logits = model(np.array([PROMPT]))[0, -1].numpy()
    likely = set(np.argsort(logits)[-4:].tolist())
    prompts = np.repeat([PROMPT], 100, axis=0)
    drawn = models.generate(model, prompts, 1, temperature=1e6, top_k=4)[:, -1]
    assert set(drawn.tolist()) == likely


def test_shares_are_those_of_the_softmax(model):
    logits = model(np.array([PROMPT]))[0, -1].numpy().astype(np.float64)
    # Cold, so that the shares of a model that has learned nothing differ.
    shares = np.exp(logits / 0.05)
    shares /= shares.sum()
    prompts = np.repeat([PROMPT], 4000, axis=0)
    drawn = models.generate(model, prompts, 1, temperature=0.05)[:, -1]
    found = np.bincount(drawn, minlength=VOCABULARY) / len(drawn)
    np.testing.assert_allclose(found, shares, atol=4 * np.sqrt(shares.max() / len(drawn)))


def test_rotary_positions_have_no_end():
    keras.utils.set_random_seed(2)
    rotary = build(positions="rotary")
    tokens = models.generate(rotary, PROMPT, 2 * LENGTH, temperature=0.0)
    logits = rotary(tokens[None, :-1])[0, -1].numpy()
    assert logits[tokens[-1]] >= logits.max() - 1e-5
    short = models.generate(rotary, PROMPT, 2 * LENGTH, temperature=0.0, max_length=4)
    logits = rotary(short[None, -5:-1])[0, -1].numpy()
    assert logits[short[-1]] >= logits.max() - 1e-5


def test_no_tokens(model):
    assert models.generate(model, PROMPT, 0).tolist() == list(PROMPT)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt_tokens": []}, "prompt_tokens"),
        ({"prompt_tokens": [0.5]}, "float64"),
        ({"prompt_tokens": [[[1]]]}, r"\(1, 1, 1\)"),
        ({"prompt_tokens": [1, VOCABULARY]}, "from 1 to 59"),
        ({"prompt_tokens": [-1]}, "-1"),
        ({"num_tokens": -1}, "num_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"max_length": 0}, "max_length"),
    ],
)
def test_what_does_not_fit(model, arguments, words):
    with pytest.raises(ValueError, match=words):
        models.generate(model, **{"prompt_tokens": PROMPT, "num_tokens": 1, **arguments})
