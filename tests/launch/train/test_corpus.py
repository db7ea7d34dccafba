"""Texts that language models are fine-tuned on: what is said where one cannot be had."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tfdist.addons.datasets import loading
from tfdist.launch.flags.command import UsageError
from tfdist.launch.train import corpus

pytest.importorskip("tensorflow_datasets")


def test_a_text_that_cannot_be_prepared_offers_texts(tmp_path, monkeypatch):
    """Not the digits, which are images."""

    def fail():
        raise ConnectionError("no network")

    builder = SimpleNamespace(
        name="books",
        data_path=tmp_path / "books",
        data_dir_root=tmp_path,
        is_prepared=lambda: False,
        download_and_prepare=fail,
    )
    monkeypatch.setattr(loading, "open_builder", lambda name, data_dir: builder)
    with pytest.raises(UsageError) as caught:
        corpus.read_tokens("tfds:books/text", None, None)
    message = str(caught.value)
    assert "'books' cannot be prepared" in message and "no network" in message
    assert "--dataset=pydoc or text:FILE" in message
    assert "digits" not in message and "\n" not in message
