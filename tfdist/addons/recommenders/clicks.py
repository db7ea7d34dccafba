"""Synthetic clicks drawn by a known rule, which is the best possible prediction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdist.utils import checks

#: The width of the vectors of the rule.
_WIDTH = 4
#: The exponent of the frequencies of ids: the k-th is drawn in proportion to k ** -1.05.
_EXPONENT = 1.05


def make_clicks(
    rows: int,
    num_dense: int,
    vocabulary_sizes: Sequence[int],
    *,
    seed: int = 0,
    rule_seed: int = 0,
    strength: float = 3.0,
) -> tuple[dict[str, np.ndarray], np.ndarray, float]:
    """Draws dense features, ids and clicks for `tfdist.addons.recommenders.dlrm`.

    Each id has a vector, and so has each dense feature; the logit of a click is the sum of the dot
    products of all pairs of a row's vectors. Ids follow a power law, as those of users and items do.

    Args:
        rows: The number of samples.
        num_dense: The number of dense features.
        vocabulary_sizes: The number of ids of each feature.
        seed: The seed of the samples.
        rule_seed: The seed of the rule: sets of the same rule differ only by `seed`.
        strength: The standard deviation of the logits. Larger values make clicks more predictable.

    Returns:
        The inputs: "dense" float32 [rows, num_dense], "id_0", ... int32 [rows, 1]; the clicks, 0.0 or
        1.0, float32 [rows, 1]; and the floor: the mean cross-entropy of the rule itself on these
        clicks, in nats.
    """
    rows = checks.integer("rows", rows, minimum=1)
    num_dense = checks.integer("num_dense", num_dense, minimum=1)
    vocabulary_sizes = checks.integers("vocabulary_sizes", vocabulary_sizes, minimum=1)
    seed = checks.integer("seed", seed, minimum=0)
    rule_seed = checks.integer("rule_seed", rule_seed, minimum=0)
    strength = checks.number("strength", strength, above=0)
    chance, rule = np.random.default_rng(seed), np.random.default_rng(rule_seed)
    dense = chance.normal(size=(rows, num_dense)).astype("float32")
    inputs = {"dense": dense}
    vectors = [dense @ rule.normal(size=(num_dense, _WIDTH)) / num_dense**0.5]
    for number, size in enumerate(vocabulary_sizes):
        weights = np.arange(1, size + 1) ** -_EXPONENT
        # The frequency of an id is independent of its number.
        ids = rule.permutation(size)[chance.choice(size, rows, p=weights / weights.sum())]
        inputs[f"id_{number}"] = ids.astype("int32")[:, None]
        vectors.append(rule.normal(size=(size, _WIDTH))[ids])
    total, squares = sum(vectors), sum((vector**2).sum(axis=1) for vector in vectors)
    # The square of the sum has each pair twice, and each vector with itself.
    logits = ((total**2).sum(axis=1) - squares) / 2
    pairs = len(vectors) * (len(vectors) - 1) / 2
    logits *= strength / (pairs * _WIDTH) ** 0.5
    clicks = chance.random(rows) < 1 / (1 + np.exp(-logits))
    floor = np.logaddexp(0, np.where(clicks, -logits, logits)).mean()
    return inputs, clicks.astype("float32")[:, None], float(floor)
