"""Residuals and warm starts in checkpoints."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from tests import conftest
from tests.checkpoint import resume_programs
from tests.checkpoint.test_resume import check
from tests.conftest import on_ranks

KINDS = {
    "power_sgd": ("PowerSGD", {"rank": 1, "min_compression_rate": 1.0}),
    "top_k": ("TopK", {"ratio": 0.1, "momentum_correction": 0.5, "min_elements": 64}),
    "one_bit": ("OneBit", {"block": 64, "min_elements": 64}),
}


def compressor(name: str):
    from tfdist.addons import slow_links

    kind, arguments = KINDS[name]
    return getattr(slow_links, kind)(**arguments, start_step=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["power_sgd", "top_k", "one_bit"])
@on_ranks(("horovod", 2), ("tensorflow", 2))
def test_goes_on_bit_for_bit(pool, tmp_path, name):
    check(pool, tmp_path, {"data": 2, "compression": compressor(name)}, [7])


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("mesh", [{"data": 2, "tensor": 2}, {"data": 2, "pipeline": 2}])
def test_model_axes(pool, tmp_path, mesh):
    mesh = {**mesh, "compression": compressor("power_sgd")}
    check(pool, tmp_path, mesh, [7], build_model=resume_programs.gpt)


class Records(logging.Handler):
    """Keeps what is said."""

    def __init__(self):
        super().__init__()
        self.said: list[str] = []

    def emit(self, record):
        self.said.append(record.getMessage())


def restored(name: str, axes: dict, path: str):
    """What is kept after a checkpoint was restored: the count of steps and the residuals."""
    import keras

    from tfdist import checkpoint
    from tfdist.addons.slow_links.state import compression_state
    from tfdist.sharding.updates import unwrapped

    keras.backend.clear_session()
    model, data = resume_programs.perceptron({**axes, "compression": compressor(name)})
    # As a training that went on elsewhere meanwhile.
    model.fit(*data, batch_size=12, epochs=1, verbose=0)
    records = Records()
    logging.getLogger("tfdist").addHandler(records)
    try:
        checkpoint.restore(path, model)
    finally:
        logging.getLogger("tfdist").removeHandler(records)
    state = compression_state(unwrapped(model.optimizer), compressor(name))
    kept = [slot["residual"].numpy() for slot in state.slots.values()]
    return int(state.step), kept, records.said


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_another_number_of_ranks_begins_anew(pool, tmp_path):
    mesh = {"data": 2, "compression": compressor("power_sgd")}
    pool.run(resume_programs.trained, mesh, f"{tmp_path}/two", timeout=240)
    for steps, kept, said in pool.run(restored, "power_sgd", {"data": 2}, f"{tmp_path}/two"):
        assert steps == resume_programs.EPOCHS * resume_programs.BATCHES
        assert any(np.any(residual) for residual in kept)
        assert not any("residual" in line for line in said)
    more = conftest._pool("horovod", 3)
    for place, (steps, kept, said) in enumerate(
        more.run(restored, "power_sgd", {"data": 3}, f"{tmp_path}/two", timeout=240)
    ):
        assert steps == resume_programs.EPOCHS * resume_programs.BATCHES
        assert kept and not any(np.any(residual) for residual in kept)
        assert any("residual" in line for line in said) == (place == 0)
