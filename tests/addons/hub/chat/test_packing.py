"""Rows of tokens, and rows that are packed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from tfdist.addons.hub.chat.packing import batches, best_fit_decreasing, packed
from tfdist.addons.hub.chat.records import RecordError, record_of
from tfdist.addons.hub.chat.rows import Row, check_vocabulary, rows_of
from tfdist.addons.hub.chat.tokenizer import ChatTokenizer

HERE = Path(__file__).parent


@pytest.mark.parametrize("seed", range(5))
def test_bins(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 100) for _ in range(300)]
    bins = best_fit_decreasing(lengths, 100)
    assert sorted(place for members in bins for place in members) == list(range(300))
    assert all(sum(lengths[place] for place in members) <= 100 for members in bins)
    assert len(bins) <= 11 / 9 * np.ceil(sum(lengths) / 100) + 1


def test_the_fullest_bin_that_fits_is_chosen():
    assert best_fit_decreasing([6, 5, 4, 5], 10) == [[0, 2], [1, 3]]
    assert best_fit_decreasing([], 10) == []
    assert best_fit_decreasing([10, 10], 10) == [[0], [1]]


def row(*ids, trained=None):
    return Row(ids, tuple(trained or [True] * len(ids)), "f:1")


def test_packed_rows():
    rows = [row(1, 2, 3), row(4, 5), row(6, 7, 8, 9, trained=[False, False, True, True])]
    found = packed(rows, 6, pad=99)
    assert found.ids.tolist() == [[4, 5, 6, 7, 8, 9], [1, 2, 3, 99, 99, 99]]
    assert found.documents.tolist() == [[1, 1, 2, 2, 2, 2], [1, 1, 1, 0, 0, 0]]
    assert found.positions.tolist() == [[0, 1, 0, 1, 2, 3], [0, 1, 2, 0, 0, 0]]
    assert found.targets.tolist() == [[5, 99, 7, 8, 9, 99], [2, 3, 99, 99, 99, 99]]
    # No token is the target of another document's last one.
    assert found.weights.tolist() == [[1, 0, 0, 1, 1, 0], [1, 1, 0, 0, 0, 0]]
    assert found.padding == pytest.approx(3 / 12)
    apart = packed(rows, 6, pad=99, pack=False)
    assert apart.ids.shape == (3, 6) and apart.weights.sum() == found.weights.sum()
    assert [each.ids.shape for each in batches(apart, 2)] == [(2, 6)]


def test_truncation():
    long = row(1, 2, 3, 4, trained=[False, False, True, True])
    assert (
        long.truncated(2, "keep_start").ids == (1, 2)
        and not long.truncated(2, "keep_start").targets
    )
    assert long.truncated(3, "keep_end").ids == (2, 3, 4)
    assert long.truncated(9, "keep_end") == long


def test_tokens_beyond_the_vocabulary():
    assert list(check_vocabulary([row(1, 9)], 10)) == [row(1, 9)]
    with pytest.raises(RecordError, match=r"^f:1: Tokens must be less than 9"):
        list(check_vocabulary([row(1, 9)], 9))


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((HERE / "tokenizer.json").read_bytes())
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    return ChatTokenizer(tmp_path)


def test_texts_end_in_the_last_token(tokenizer):
    record = record_of({"prompt": "Name a", "completion": " colour"}, "f:1")
    (found,) = rows_of(record, tokenizer)
    assert tokenizer.decode(found.ids) == "Name a colour</s>"
    trained = [number for number, kept in zip(found.ids, found.trained, strict=True) if kept]
    assert tokenizer.decode(trained) == " colour</s>"
    (found,) = rows_of(record_of({"text": "Name</s>"}, "f:1"), tokenizer)
    assert found.ids.count(tokenizer.eos) == 1 and all(found.trained)


@pytest.mark.parametrize("prompt", ["Name a", "Name a ", "Name a c", "Name  "])
def test_the_whole_answer_is_trained(tokenizer, prompt):
    """Also where the end of the prompt and the begin of the answer are one token."""
    whole = "Name a colour" if prompt != "Name  " else "Name   colour"
    answer = whole[len(prompt) :]
    (found,) = rows_of(record_of({"prompt": prompt, "completion": answer}, "f:1"), tokenizer)
    assert list(found.ids) == [*tokenizer.encode(whole, special=True).ids, tokenizer.eos]
    trained = [number for number, kept in zip(found.ids, found.trained, strict=True) if kept]
    assert tokenizer.decode(trained).endswith(f"{answer}</s>")


def test_messages_without_a_template(tokenizer):
    message = {"role": "user", "content": "a"}
    with pytest.raises(RecordError, match="require a chat template"):
        rows_of(record_of({"messages": [message]}, "f:1"), tokenizer)


def test_an_empty_text(tokenizer):
    with pytest.raises(RecordError, match="at least two tokens"):
        rows_of(record_of({"text": ""}, "f:1"), tokenizer)
