"""Text as bytes: the one that Python carries, files, and the windows that models learn from."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.addons.datasets import language_model_windows, load_text


def read(windows):
    """All windows, and what follows each token in them, of shape [windows, length]."""
    tokens, following = zip(*windows.as_numpy_iterator(), strict=True)
    return np.stack(tokens), np.stack(following)


@pytest.fixture(scope="module")
def pydoc():
    return load_text("pydoc")


def test_pydoc_is_english_of_some_size(pydoc):
    size = len(pydoc.train) + len(pydoc.validation)
    assert 250_000 < size < 1_000_000
    assert len(pydoc.validation) == pytest.approx(size / 10, rel=0.01)
    for part in (pydoc.train, pydoc.validation):
        assert part.dtype == np.uint8
        words = bytes(part).lower().split()
        assert words.count(b"the") > 0.03 * len(words)


def test_what_validates_was_not_trained_on(pydoc):
    # The topics repeat each other: cut as they come, three tenths of these would be found.
    length = 48
    train, validation = bytes(pydoc.train), bytes(pydoc.validation)
    known = {train[i : i + length] for i in range(len(train) - length)}
    pieces = [validation[i : i + length] for i in range(0, len(validation) - length, 7)]
    assert sum(piece in known for piece in pieces) < 0.02 * len(pieces)


def test_a_file(tmp_path, monkeypatch):
    content = bytes(range(256)) * 4
    (tmp_path / "own").write_bytes(content)
    text = load_text(f"text:{tmp_path}/own")
    assert bytes(text.train) + bytes(text.validation) == content
    assert len(text.train) == 921
    assert text.vocabulary_size == 256
    monkeypatch.setenv("HOME", str(tmp_path))
    assert bytes(load_text("text:~/own").train) == bytes(text.train)


def test_what_is_no_text(tmp_path):
    (tmp_path / "empty").touch()
    for name, words in {
        "digits": "'digits'",
        f"text:{tmp_path}/missing": "missing",
        f"text:{tmp_path}": "directory",
        f"text:{tmp_path}/empty": "empty",
    }.items():
        with pytest.raises(ValueError, match=words):
            load_text(name)


def test_windows_follow_each_other():
    windows = language_model_windows(np.arange(11, dtype=np.uint8), 3)
    spec = tf.TensorSpec([3], tf.int32)
    assert windows.element_spec == (spec, spec)
    tokens, following = read(windows)
    assert int(windows.cardinality()) == len(tokens)
    np.testing.assert_array_equal(tokens, [[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    np.testing.assert_array_equal(following, tokens + 1)


@pytest.mark.parametrize("size", [23, 24, 25, 26, 27])
def test_shuffled_passes_differ_and_are_of_one_size(size):
    windows = language_model_windows(np.arange(size), 4, shuffle_seed=3)
    begins = set()
    for _ in range(20):
        tokens, following = read(windows)
        assert len(tokens) == int(windows.cardinality()) == (size - 4) // 4
        np.testing.assert_array_equal(following, tokens + 1)
        firsts = np.sort(tokens[:, 0])
        np.testing.assert_array_equal(np.diff(firsts), 4)
        assert following.max() < size
        begins.add(int(firsts[0]))
    assert begins == {0, 1, 2, 3}


def test_one_seed_is_one_order():
    def passes(of_all, of_windows):
        tf.random.set_seed(of_all)
        windows = language_model_windows(np.arange(100), 4, shuffle_seed=of_windows).batch(5)
        return [[x[0].tolist() for x, _ in windows.as_numpy_iterator()] for _ in range(3)]

    first = passes(0, 0)
    assert passes(0, 0) == first
    assert passes(1, 0) != first != passes(0, 1)
    assert first[0] != first[1] != first[2]


def test_windows_that_do_not_fit():
    assert int(language_model_windows(np.arange(5), 4).cardinality()) == 1
    for length, words in {4: "Received: .*, 4 tokens", 0: "length=0"}.items():
        with pytest.raises(ValueError, match=words):
            language_model_windows(np.arange(4), length)
    # Wherever a shuffled pass begins there is a window.
    with pytest.raises(ValueError, match="at least 8 tokens"):
        language_model_windows(np.arange(7), 4, shuffle_seed=0)
