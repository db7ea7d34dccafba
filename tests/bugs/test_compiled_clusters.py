"""Steps of which XLA compiles parts, as `TF_XLA_FLAGS` may say of any program.

The story: under these flags ZeRO-3 trained a tied embedding wrongly, without a word. What lies of a sparse
gradient in a rank's shard was picked by two filters in a row, whose sizes only the run knows, and XLA
makes other rows of them. Experts ended in thirty lines of XLA's.
"""

from __future__ import annotations

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.bugs.comparing import compare, on_mesh, outcome
from tests.strategies.programs import cross_entropy, in_one_process, scope, start
from tfdist import Mesh
from tfdist.backend.graph.compiling import needs_fixed_sizes
from tfdist.collectives import Group
from tfdist.gradients.elementwise import _ELEMENTWISE
from tfdist.gradients.sparse import shard_of_rows
from tfdist.sharding.parts import FlatShard
from tfdist.testing import RankPool

FLAGS = {"TF_XLA_FLAGS": "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"}
ROWS, BATCH, WORDS, LENGTH = 14, 8, 23, 5  # The last batch has six rows.


class Tied(keras.Model):
    """The table of tokens also makes the logits; positions have one of their own."""

    def __init__(self):
        super().__init__()
        self.tokens = keras.layers.Embedding(WORDS, 6)
        self.positions = keras.layers.Embedding(LENGTH, 6)
        self.hidden = keras.layers.Dense(6, "tanh")

    def call(self, x):
        hidden = self.hidden(self.tokens(x) + self.positions(tf.range(LENGTH)))
        return tf.matmul(hidden, tf.convert_to_tensor(self.tokens.embeddings), transpose_b=True)


def split():
    return tfdist.models.gpt(WORDS, num_layers=1, width=8, num_heads=2, max_length=LENGTH)


def experts():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            layers.Embedding(WORDS, 6),
            tfdist.experts.MixtureOfExperts(4, 8),
            layers.Dense(WORDS),
        ]
    )


def tables():
    table = tfdist.addons.recommenders.TableConfig("table", WORDS, 6, placement="rows")
    ids = {"ids": keras.Input((LENGTH,), dtype="int32", name="ids")}
    found = tfdist.addons.recommenders.ShardedEmbedding(
        [tfdist.addons.recommenders.FeatureConfig("ids", table)]
    )(ids)
    return keras.Model(ids, keras.layers.Dense(WORDS)(found["ids"]))


def train(strategy, build=Tied):
    start()
    chance = np.random.default_rng(3)
    x, y = (chance.integers(0, WORDS, (ROWS, LENGTH)) for _ in range(2))
    with scope(strategy):
        model = build()
        loss = tfdist.layers.VocabParallelCrossEntropy(WORDS) if build is split else cross_entropy()
        model.compile(keras.optimizers.Adam(0.02, global_clipnorm=0.5), loss)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    return outcome(model, history)


def train_split(strategy):
    return train(strategy, split)


LAYOUTS = {
    "data": (train, Mesh(), {}),
    "zero1": (train, Mesh(), {"zero_stage": 1}),
    "zero2": (train, Mesh(), {"zero_stage": 2}),
    "zero3": (train, Mesh(), {"zero_stage": 3}),
    "tensor": (train_split, Mesh(tensor=2), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["horovod", "tensorflow"])
def test_as_one_process_that_compiles_nothing(one_process, engine):
    with RankPool(2, engine, environment=FLAGS) as pool:
        for layout, (program, mesh, options) in LAYOUTS.items():
            expected = one_process.run(in_one_process, program)[0]
            for rank, got in enumerate(pool.run(on_mesh, program, mesh, options, timeout=400)):
                compare(f"{layout}, rank {rank}", got, expected, 1e-5)


def refusal(strategy, build) -> str:
    with pytest.raises(ValueError, match="XLA cannot compile") as found:
        train(strategy, build)
    return str(found.value)


def refused_experts(strategy):
    return refusal(strategy, experts)


def refused_tables(strategy):
    return refusal(strategy, tables)


@pytest.mark.slow
def test_what_has_no_fixed_sizes_is_refused():
    with RankPool(2, "horovod", environment=FLAGS) as pool:
        for said in pool.run(on_mesh, refused_experts, Mesh(data=1, expert=2), {}):
            assert "the experts of `mixture_of_experts" in said and "tf_xla_auto_jit=2" in said
        for said in pool.run(on_mesh, refused_tables, Mesh(), {}):
            assert "the tables of `sharded_embedding" in said


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", False),
        ("--tf_xla_enable_lazy_compilation=false", False),
        ("--tf_xla_auto_jit=-1", False),
        ("--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit", True),
        ("--tf_xla_auto_jit=fusible", True),
        ("/etc/flags", True),
    ],
)
def test_what_the_flags_say(monkeypatch, flags, expected):
    monkeypatch.setenv("TF_XLA_FLAGS", flags)
    assert needs_fixed_sizes() is expected


def shards(monkeypatch, flags: str) -> list[tf.IndexedSlices]:
    monkeypatch.setenv("TF_XLA_FLAGS", flags)
    values = tf.reshape(tf.range(1.0, 16.0), [5, 3])
    rows = tf.IndexedSlices(values, tf.constant([4, 0, 6, 4, 2]), tf.constant([7, 3]))
    groups = [Group((0, 1, 2, 3), "data", types.SimpleNamespace(rank=rank)) for rank in range(4)]
    return [shard_of_rows(rows, FlatShard(group, (7, 3))) for group in groups]


@pytest.mark.parametrize("kind", _ELEMENTWISE)
def test_zeros_in_the_places_of_other_shards_change_no_update(monkeypatch, kind):
    changing, fixed = (shards(monkeypatch, flags) for flags in ("", FLAGS["TF_XLA_FLAGS"]))
    for some, every in zip(changing, fixed, strict=True):
        assert every.values.shape == (15,)
        found = []
        for gradient in (some, every):
            variable = keras.Variable(np.linspace(-1, 1, 6, dtype="float32"))
            optimizer = kind(0.1, weight_decay=0.01, clipnorm=20.0)
            for _ in range(3):
                optimizer.apply([gradient], [variable])
            found.append(variable.numpy())
        np.testing.assert_allclose(*found, rtol=1e-6)
