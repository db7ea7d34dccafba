"""Makes a small preset of KerasHub to fine-tune: a GPT-2 of English that Python carries.

    python make_preset.py --output=gpt2-small/
    tfdist-run -np 2 -- tfdist-finetune --preset=gpt2-small/ --tensor=2 --lora_rank=8 \
        --prompt="The statement"

A tokenizer is trained on the docstrings of the standard library, and then a model; `tfdist-finetune`
learns from the reference of the language, which comes with Python too (`--dataset=pydoc`). No file is
downloaded. This program runs on one process, without tfdist.
"""

from __future__ import annotations

import ast
import sysconfig
import tempfile
from pathlib import Path

import keras
import keras_hub
import numpy as np
from absl import app, flags
from tokenizers import ByteLevelBPETokenizer

_OUTPUT = flags.DEFINE_string("output", "gpt2-small", "Folder of the preset")
_VOCABULARY = flags.DEFINE_integer("vocabulary", 2000, "Tokens of the tokenizer", lower_bound=300)
_STEPS = flags.DEFINE_integer("steps", 300, "Steps of training", lower_bound=1)
_LAYERS = flags.DEFINE_integer("layers", 4, "Transformer blocks", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 128, "Width, with four heads", lower_bound=4)
_LENGTH = flags.DEFINE_integer("seq_length", 128, "Tokens per window", lower_bound=2)

_END = "<|endoftext|>"
_BATCH = 16


def docstrings() -> list[str]:
    """The docstrings of the standard library's modules, classes and functions."""
    found = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(file.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and text.isascii():
                    found.append(text)
    return found


def train_tokenizer(texts: list[str]):
    """A byte-pair tokenizer as GPT-2 has it (Sennrich et al. 2016; Radford et al. 2019)."""
    trainer = ByteLevelBPETokenizer()
    trainer.train_from_iterator(
        texts, vocab_size=_VOCABULARY.value, special_tokens=[_END], show_progress=False
    )
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, merges = trainer.save_model(folder)
        return keras_hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=merges)


def windows(tokenizer, texts: list[str], length: int) -> np.ndarray:
    """The tokens of the texts, cut into rows of `length` + 1."""
    end = tokenizer.end_token_id
    tokens = np.concatenate([[*np.array(tokenizer(text)), end] for text in texts])
    rows = len(tokens) // (length + 1)
    return tokens[: rows * (length + 1)].reshape(rows, length + 1).astype("int32")


def main(_) -> None:
    """Trains the tokenizer and the model, and saves both."""
    keras.utils.set_random_seed(0)
    folder, length = Path(_OUTPUT.value), _LENGTH.value
    texts = docstrings()
    tokenizer = train_tokenizer(texts)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=tokenizer.vocabulary_size(),
        num_layers=_LAYERS.value,
        num_heads=4,
        hidden_dim=_WIDTH.value,
        intermediate_dim=4 * _WIDTH.value,
        max_sequence_length=max(256, length),
        dropout=0.0,
    )
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None, compile=False)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3), loss, weighted_metrics=None)
    rows = windows(tokenizer, texts, length)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    rows = np.resize(rows, (_STEPS.value * _BATCH, length + 1))
    x = {"token_ids": rows[:, :-1], "padding_mask": np.ones_like(rows[:, :-1])}
    model.fit(x, rows[:, 1:], batch_size=_BATCH, verbose=2, shuffle=False)
    model.preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(
        tokenizer, sequence_length=length
    )
    model.save_to_preset(str(folder))
    print(
        f"Saved {model.count_params():,} weights and {tokenizer.vocabulary_size():,} tokens: {folder}"
    )


if __name__ == "__main__":
    app.run(main)
