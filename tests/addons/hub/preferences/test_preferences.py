"""Losses of pairs and of rewards: those of the formulas, and on ranks those of one process."""

from __future__ import annotations

import numpy as np
import pytest

from tests.addons.hub.preferences import programs
from tests.conftest import on_ranks, slow_but
from tests.processes import python

pytest.importorskip("keras_hub")

KINDS = ["dpo", "ipo", "conservative", "robust", "orpo"]
LAYOUTS = {
    "data": {},
    "tensor": {"mesh": {"tensor": 2}},
    "zero": {"zero_stage": 3},
    "pipeline": {"mesh": {"pipeline": 2}},
}


def options_of(kind: str) -> dict:
    return {"label_smoothing": 0.1} if kind in ("conservative", "robust") else {}


@pytest.mark.parametrize("kind", slow_but(["dpo", "orpo"], KINDS))
def test_the_first_loss_is_that_of_the_formula(one_process, kind):
    ((expected, sums),) = one_process.run(programs.by_formula, "Llama3", kind)
    ((losses, _, references, _),) = one_process.run(
        programs.train, "Llama3", None, kind, **options_of(kind)
    )
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]
    if kind != "orpo":
        np.testing.assert_allclose(references, sums, rtol=1e-5, atol=1e-5)


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("layout", slow_but(["tensor"], list(LAYOUTS)))
@pytest.mark.parametrize("kind", slow_but(["dpo"], KINDS))
def test_ranks(pool, one_process, kind, layout):
    options = options_of(kind)
    (right,) = one_process.run(programs.train, "Llama3", None, kind, **options)
    for found in pool.run(programs.train, "Llama3", LAYOUTS[layout], kind, timeout=300, **options):
        check(found, right)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("reference", ["initial", "base"])
def test_adapters(pool, one_process, layout, reference):
    """New adapters change nothing, so the base is the initial model."""
    (right,) = one_process.run(programs.train, "GPT2", None, "dpo", True)
    options = {"reference": reference}
    for found in pool.run(
        programs.train, "GPT2", LAYOUTS[layout], "dpo", True, timeout=300, **options
    ):
        check(found, right)


def check(found, right) -> None:
    losses, weights, references, agreement = found
    expected, own, right_references, right_agreement = right
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(references, right_references, rtol=1e-5, atol=1e-5)
    assert agreement == right_agreement
    for path, value in own.items():
        least = 1e-5 * max(np.abs(value).max(), 1e-2)
        np.testing.assert_allclose(weights[path], value, atol=least, err_msg=path)


REWARDS = {
    "dapo": {},
    "grpo": {"average": "grpo", "scaled": False},
    "dr_grpo": {"average": "dr_grpo", "updates": 2},
    "divergence": {"beta": 0.1, "lora": True, "updates": 2},
    "cold": {"temperature": 0.7, "updates": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REWARDS)
def test_rewards_rise(one_process, tmp_path, kind):
    options = REWARDS[kind]
    ((found, _),) = one_process.run(
        programs.rewarded, str(tmp_path), None, 15, timeout=300, **options
    )
    rewards = [step["reward"] for step in found]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4])


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("layout", slow_but(["tensor"], ["tensor", "zero", "pipeline"]))
@pytest.mark.parametrize("kind", slow_but(["divergence"], list(REWARDS)))
def test_ranks_sample_and_learn_as_one(pool, one_process, tmp_path, layout, kind):
    options = REWARDS[kind]
    ((right, weights),) = one_process.run(
        programs.rewarded, str(tmp_path), None, timeout=300, **options
    )
    for found, own in pool.run(
        programs.rewarded, str(tmp_path), LAYOUTS[layout], timeout=300, **options
    ):
        for step, expected in zip(found, right, strict=True):
            assert step == pytest.approx(expected, rel=1e-4, abs=1e-5)
        for path, value in weights.items():
            np.testing.assert_allclose(own[path], value, atol=1e-4, err_msg=path)


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_ranks_share_the_sampling(pool, tmp_path):
    results = pool.run(programs.rewarded, str(tmp_path), {}, 10, timeout=300)
    rewards = [[step["reward"] for step in found] for found, _ in results]
    assert rewards[0] == rewards[1]
    assert np.mean(rewards[0][-3:]) > np.mean(rewards[0][:3])


def test_losses_are_those_of_the_temperature():
    from tfdist.addons.hub.preferences.losses import GRPOLoss

    random = np.random.default_rng(3)
    logits = random.normal(0, 2, [2, 5, 8]).astype("float32")
    labels = np.stack([random.integers(0, 8, [2, 5]), *random.normal(size=[4, 2, 5])], -1)
    labels[..., 1] = 1
    options = {"beta": 0.1, "epsilon_high": 0.3}
    found = GRPOLoss(8, temperature=0.5, **options).call(labels.astype("float32"), logits)
    right = GRPOLoss(8, **options).call(labels.astype("float32"), logits / 0.5)
    np.testing.assert_allclose(found, right, rtol=1e-6)


@pytest.mark.parametrize("updates", [2])
def test_steps_with_other_numbers_of_prompts(one_process, tmp_path, updates):
    """Graphs write the log-probabilities of so many answers."""
    counts = [4, 2, 3, 1, 4]
    found = one_process.run(
        programs.of_counts, str(tmp_path), counts, updates=updates, timeout=300
    )[0]
    assert len(found) == len(counts) and np.isfinite(found).all()


@on_ranks(("horovod", 2))
def test_a_prompt_that_is_too_long_is_an_error_of_all(pool, tmp_path):
    for said in pool.run(programs.with_a_long_prompt, str(tmp_path), timeout=200):
        assert said.startswith("Prompt 1 cannot be answered. Received: Messages must have fewer")


@pytest.mark.parametrize("kind", ["dpo", "orpo"])
def test_pairs_of_padding_change_no_loss(one_process, kind):
    right, *others = one_process.run(programs.evaluated, kind, [1, 2, 3, 4])[0]
    np.testing.assert_allclose(others, right, rtol=1e-6)


_SAVE = """
import sys, keras
from tfdist.addons.hub.preferences.losses import GRPOLoss, PreferenceLoss
losses = [PreferenceLoss(8, kind="robust", label_smoothing=0.25), GRPOLoss(8, epsilon_high=0.25)]
for loss in losses:
    model = keras.Sequential([keras.Input((3, 2)), keras.layers.Dense(8)])
    model.compile("sgd", loss)
    model.save(f"{sys.argv[1]}/{loss.name}.keras")
"""
_LOAD = """
import sys, keras, tfdist
for name in ("preference_loss", "grpo_loss"):
    loss = keras.models.load_model(f"{sys.argv[1]}/{name}.keras").loss
    print(loss.name, loss.get_config().get("label_smoothing"), loss.get_config().get("epsilon_high"))
"""


def test_saved_models_load_with_the_losses(tmp_path):
    python(_SAVE, str(tmp_path))
    found = python(_LOAD, str(tmp_path)).splitlines()
    assert found == ["preference_loss 0.25 None", "grpo_loss None 0.25"]
