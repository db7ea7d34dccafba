"""Trained tokens a second of packed rows, beside rows that are padded to the longest of their batch.

    python -m benchmarks.packing [--rounds=9] [--layers=4] [--width=256]

Conversations have random tokens and log-normal lengths, as chat data do. Both sides take turns in one process, each with
all conversations once. The speed of packed rows should be that of padded ones times the ratio of the rows' tokens; the
masks of documents cost some of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np

LIMIT = 0.85
WORDS = 2048


def conversations(count: int, length: int) -> list:
    """Rows of tokens with log-normal lengths, of which the second half is trained."""
    from tfdist.addons.hub.chat.rows import Row

    random = np.random.default_rng(0)
    sizes = np.clip(random.lognormal(np.log(length / 5), 0.8, count), 8, length).astype(int)
    return [
        Row(
            tuple(random.integers(1, WORDS, size).tolist()),
            tuple(place >= size // 2 for place in range(size)),
            f"conversation {number}",
        )
        for number, size in enumerate(sizes)
    ]


def padded_batches(rows: list, size: int) -> list[tuple]:
    """Batches of rows in the given order, padded to the longest of each."""
    from tfdist.addons.hub.chat.packing import packed

    found = []
    for begin in range(0, len(rows), size):
        some = rows[begin : begin + size]
        batch = packed(some, max(map(len, some)), pack=False)
        mask = (batch.documents > 0).astype("int32")
        x = {"token_ids": batch.ids, "padding_mask": mask}
        found.append((x, batch.targets, batch.weights / batch.weights.sum()))
    return found


def packed_batches(rows: list, size: int, length: int) -> list[tuple]:
    """Batches of packed rows."""
    from tfdist.addons.hub.chat.data import chat_batches

    return list(chat_batches(rows, size, length=length, packing=True, updates=1).dataset)


def build(options, packed: bool):
    """A compiled model of KerasHub with adapters."""
    import keras
    import keras_hub

    from tfdist.addons.hub.documents import separate_documents
    from tfdist.layers import VocabParallelCrossEntropy
    from tfdist.strategies import LocalStrategy

    keras.utils.set_random_seed(0)
    with LocalStrategy().scope():
        backbone = keras_hub.models.Llama3Backbone(
            vocabulary_size=WORDS,
            num_layers=options.layers,
            num_query_heads=options.width // 32,
            num_key_value_heads=options.width // 64,
            hidden_dim=options.width,
            intermediate_dim=4 * options.width,
        )
        task = keras_hub.models.Llama3CausalLM(backbone=backbone, preprocessor=None, compile=False)
        backbone.enable_lora(8)
        model = separate_documents(task) if packed else task
        loss = VocabParallelCrossEntropy(WORDS, reduction="sum", chunk_size=1024)
        model.compile(keras.optimizers.AdamW(1e-4), loss, weighted_metrics=None)
    return model


def main() -> int:
    """Prints the speeds and their ratio; exit code 1 if it is below the limit."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--rounds", type=int, default=9)
    flags.add_argument("--layers", type=int, default=4)
    flags.add_argument("--width", type=int, default=256)
    flags.add_argument("--length", type=int, default=512)
    flags.add_argument("--rows", type=int, default=64)
    flags.add_argument("--batch", type=int, default=8)
    options = flags.parse_args()
    rows = conversations(options.rows, options.length)
    sides = {
        "padded": (build(options, False), padded_batches(rows, options.batch)),
        # As many tokens in a batch, on average.
        "packed": (build(options, True), packed_batches(rows, options.batch // 4, options.length)),
    }
    tokens = {
        name: sum(int(np.prod(x["token_ids"].shape)) for x, _, _ in batches)
        for name, (_, batches) in sides.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.rounds + 1):
        for name, (model, batches) in sides.items():
            begin = time.perf_counter()
            for x, y, weights in batches:
                model.train_on_batch(x, y, weights)
            if number:  # The first round makes graphs.
                seconds[name].append(time.perf_counter() - begin)
    trained = sum(row.targets for row in rows)
    for name, found in seconds.items():
        print(
            f"{name}: {tokens[name]:,} tokens in rows, {trained / statistics.median(found):,.0f} trained "
            "tokens/s"
        )
    wanted = tokens["padded"] / tokens["packed"]
    ratios = sorted(
        padded / packed / wanted
        for padded, packed in zip(seconds["padded"], seconds["packed"], strict=True)
    )
    middle = statistics.median(ratios)
    print(
        f"Rows have {wanted:.2f} times fewer tokens; of that, packing gains {middle:.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f}), at least {LIMIT}."
    )
    return int(middle < LIMIT)


if __name__ == "__main__":
    sys.exit(main())
