"""Where models of several tensors are cut, and where not."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.conftest import slow_but
from tests.parity.families import FAMILIES
from tests.pipeline import several
from tfdist.backend.keras.functional import is_deferred
from tfdist.pipeline import deferred_weights
from tfdist.pipeline.chain import Chain
from tfdist.pipeline.cuts import Step, order, places
from tfdist.pipeline.partition import make_partition
from tfdist.pipeline.shapes import RowShape


def dense(name, **options):
    return keras.layers.Dense(4, name=name, **options)


def add(*tensors, name):
    return keras.layers.Add(name=name)(list(tensors))


def parts(outputs, inputs):
    """The names of the segments, and how many tensors lead on behind each."""
    return [
        (segment.name, len(segment.after))
        for segment in Chain(keras.Model(inputs, outputs)).segments
    ]


def test_steps_run_shortly_before_they_are_needed():
    random = np.random.default_rng(0)
    for _ in range(50):
        steps: list[Step] = []
        for number in range(random.integers(2, 12)):
            made = [tensor for step in steps for tensor in step.makes]
            count = random.integers(0, 3) if made else 0
            reads = random.choice(made, count) if count else []
            steps.append(Step(tuple(map(int, reads)), (2 * number, 2 * number + 1)))
        outputs = [steps[-1].makes[0], steps[len(steps) // 2].makes[0]]
        found = order(steps, outputs)
        done: set[int] = set()
        for place in found:
            assert set(steps[place].reads) <= done
            done |= set(steps[place].makes)
        assert set(outputs) <= done
        read = {tensor for place in found for tensor in steps[place].reads} | set(outputs)
        assert all(set(steps[place].makes) & read for place in found)
        lies = places([steps[place] for place in found], set(outputs))
        assert lies[-1].is_cut and set(lies[-1].live) == set(outputs)


def encoder_decoder():
    source, target = keras.Input((4,), name="source"), keras.Input((4,), name="target")
    x = dense("encode0")(source)
    x = add(x, dense("encode1")(x), name="encoded")
    y = dense("decode")(target)
    for number in range(3):
        inside = add(dense(f"own{number}")(y), dense(f"cross{number}")(x), name=f"both{number}")
        y = add(y, dense(f"more{number}")(inside), name=f"block{number}")
    return [source, target], y


def test_blocks_that_share_an_output_are_cut_apart_and_their_shortcuts_are_not():
    inputs, y = encoder_decoder()
    assert parts(y, inputs) == [
        ("encode0", 1),
        ("encode1 + encoded", 1),
        ("decode + cross0 + own0 + both0 + more0 + block0", 2),
        ("own1 + cross1 + both1 + more1 + block1", 2),
        ("cross2 + own2 + both2 + more2 + block2", 1),
    ]


def test_a_condition_of_all_blocks_is_shared():
    x, time = keras.Input((4,), name="x"), keras.Input((1,), name="time")
    condition = dense("condition")(time)
    y = dense("in")(x)
    for number in range(2):
        inside = add(dense(f"up{number}")(y), condition, name=f"moved{number}")
        y = add(y, dense(f"down{number}")(inside), name=f"block{number}")
    found = parts(dense("out")(y), [x, time])
    assert [name for name, _ in found] == [
        "in",
        "up0 + condition + moved0 + down0 + block0",
        "up1 + moved1 + down1 + block1",
        "out",
    ]
    assert [count for _, count in found] == [1, 2, 1, 1]


def long_shortcut():
    x = keras.Input((4,))
    begin = y = dense("begin")(x)
    for number in range(3):
        y = dense(f"body{number}")(y)
    return add(y, begin, name="end"), x


def ladder():
    x = keras.Input((4,))
    a = dense("a")(x)
    b = dense("b")(a)
    c = dense("c")(b)
    d = add(dense("d")(c), b, name="up1")
    return add(dense("e")(d), a, name="up0"), x


def two_branches():
    x = keras.Input((4,))
    y = dense("begin")(x)
    left = dense("left1")(dense("left0")(y))
    right = dense("right0")(y)
    right = add(right, dense("right1")(right), name="inner")
    return add(left, right, name="end"), x


def gated():
    x = keras.Input((4,))
    y = dense("begin")(x)
    gate = dense("gate1", activation="sigmoid")(dense("gate0")(y))
    return keras.layers.Multiply(name="gated")([y, gate]), x


@pytest.mark.parametrize("make", [long_shortcut, ladder, two_branches, gated])
def test_a_block_with_a_shortcut_is_whole(make):
    outputs, inputs = make()
    assert len(parts(outputs, inputs)) == 2
    with pytest.raises(
        ValueError,
        match=r"2 parts .* 3 stages: .* cannot be split, since the output of `.* in parallel",
    ):
        make_partition(Chain(keras.Model(inputs, outputs)), 3)


def test_early_outputs_wait_without_being_in_the_way():
    x = keras.Input((4,))
    y = dense("first")(x)
    early = dense("early")(y)
    y = dense("second")(y)
    late = dense("late")(y)
    assert parts([late, early, x], x) == [("first", 1), ("early", 2), ("second", 2), ("late", 2)]


def test_states_that_one_layer_hands_to_another_travel_together():
    x, y = keras.Input((5, 3), name="x"), keras.Input((2, 3), name="y")
    _, *states = keras.layers.LSTM(4, return_state=True, name="encoder")(x)
    z = keras.layers.LSTM(4, return_state=True, name="decoder")(y, initial_state=states)[0]
    assert parts(dense("head")(z), [x, y]) == [("encoder", 2), ("decoder", 1), ("head", 1)]


def test_what_models_of_keras_hub_are_cut_into():
    lm = Chain(several.lm("GPT2"))
    assert [segment.name for segment in lm.segments] == [
        "token_embedding",
        "position_embedding + embeddings_add",
        "embeddings_dropout",
        "transformer_layer_0",
        "transformer_layer_1",
        "layer_norm",
        "token_embedding",
    ]
    assert all(len(segment.after) == 1 for segment in lm.segments)
    assert all(is_deferred(v) for v in _deferred_lm().segments[0].variables)


def _deferred_lm():
    with deferred_weights():
        return Chain(several.lm("GPT2"))


#: These take longer than all others together.
LARGE = ("GptOss", "QwenMoe", "SwinTransformer", "T5")
CUT_BY_BLOCKS = [
    name for name in FAMILIES if name not in ("DeiT", "ViT", "DINOV2", "RWKV7", "XLNet")
]


@pytest.mark.parametrize(
    "name", slow_but([name for name in CUT_BY_BLOCKS if name not in LARGE], CUT_BY_BLOCKS)
)
def test_each_block_of_a_family_is_a_segment(name):
    chain = Chain(several.classifier(name))
    blocks = [
        segment
        for segment in chain.segments
        if "layer_" in segment.name or "block_" in segment.name
    ]
    assert len(blocks) >= 2 or len(chain) > 4
    x = several.rows_for(name, 3)
    np.testing.assert_allclose(run(chain, x), chain.model(x), rtol=1e-5, atol=1e-6)


def test_a_layer_that_says_another_shape_than_it_makes_is_named():
    chain = Chain(several.classifier("XLNet"))
    tensors = chain.flat_inputs(several.rows_for("XLNet", 3))
    with pytest.raises(
        ValueError, match=r"xlnet_encoder_1`. Received: a tensor of shape .* Fix its"
    ):
        for segment in chain.segments:
            tensors |= segment(tensors, training=False)


def run(chain, x):
    tensors = chain.flat_inputs(x)
    shapes = chain.row_shapes(list(tensors.values()))
    for segment in chain.segments:
        tensors |= segment(tensors, training=False)
        for number in segment.makes:
            assert shapes[number].is_known
            assert tensors[number].shape == shapes[number].at(3)
            assert tensors[number].dtype == shapes[number].dtype
    return chain.as_outputs([tensors[number] for number in chain.outputs])


def test_tensors_without_a_row_for_each_of_the_batch():
    x = keras.Input((6, 4))
    y = keras.layers.Lambda(lambda x: keras.ops.reshape(x, (-1, 4)), output_shape=(4,))
    shapes = Chain(keras.Model(x, several.Bias()(x))).row_shapes([np.zeros((5, 6, 4), "float32")])
    (bias,) = [shape for shape in shapes.values() if not shape.has_rows]
    assert bias.at(7) == [1, 6, 6] and bias.spec(None).shape == (1, 6, 6)
    several_a_row = RowShape(bias.dtype, ((6, 0), (0, 4)))
    assert several_a_row.at(7) == [42, 4] and several_a_row.spec(None).shape.as_list() == [None, 4]
    assert not several_a_row.has_rows and several_a_row.is_known
    del y


SHAPES = [
    ((6,), [(6,), (6,)]),
    ({"token_ids": (6,), "padding_mask": (6,)}, [(6,), (6,)]),
    ({"token_ids": (6,)}, [(None,), (6,)]),
    ([(5,), None], [(5,), (None,)]),
]


@pytest.mark.parametrize(("given", "rows"), SHAPES, ids=str)
def test_shapes_of_inputs(given, rows):
    chain = Chain(several.lm("GPT2"), given)
    # As Keras has them: by the names in a dict.
    assert [spec.shape[1:] for spec in list(chain.specs().values())[:2]] == rows
    assert chain.has_known_shapes == (None not in (size for row in rows for size in row))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (6, 2),
            r"the shapes of rows, \{'padding_mask': \(None,\), .* Received: input_shape=\(6, 2\)",
        ),
        ({"ids": (6,)}, r"a shape for inputs of \['padding_mask', 'token_ids'\]. Received"),
        ({}, "a shape for inputs of"),
        ([(6,), (6,), (6,)], "a shape for each of the inputs"),
        ({"token_ids": (0,)}, "list or tuple of integers of at least 1"),
        ("6", "list or tuple of integers"),
        ([], "the shapes of rows"),
    ],
    ids=str,
)
def test_shapes_that_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Chain(several.lm("GPT2"), given)


def test_no_weight_of_a_model_is_forgotten():
    for make in (several.nested, lambda: several.classifier("Bert")):
        chain = Chain(make())
        held = {id(variable) for segment in chain.segments for variable in segment.variables}
        assert held == {id(variable) for variable in chain.model.variables}
