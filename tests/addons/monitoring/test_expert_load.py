"""How evenly experts are used, and how many parameters a token uses."""

from __future__ import annotations

import numpy as np


def test_load_logs():
    from tfdist.addons.monitoring.expert_load import load_logs

    counts = {
        "one": np.array([6.0, 2.0, 0.0, 0.0, 1.0]),
        "two": np.array([2.0, 2.0, 2.0, 2.0, 0.0]),
    }
    logs = load_logs(counts)
    assert logs == {"expert_load": 2.0, "expert_max_violation": 2.0, "expert_dropped": 1 / 16}
    assert load_logs({}) == {}


def test_parameter_counts():
    from tfdist import models
    from tfdist.addons.monitoring import parameter_counts

    options = {"num_layers": 2, "width": 8, "num_heads": 2, "hidden_dim": 16, "max_length": 4}
    model = models.gpt(32, num_experts=4, top_k=1, **options)
    found = parameter_counts(model)
    assert found["total"] == sum(int(np.prod(w.shape)) for w in model.trainable_variables)
    # A token meets one of four experts in each of two blocks: two products of 8 x 16, and their biases.
    expert = 2 * 8 * 16 + 16 + 8
    assert found["total"] - found["active"] == 2 * 3 * expert
    dense = parameter_counts(models.gpt(32, **options))
    assert dense["total"] == dense["active"]
