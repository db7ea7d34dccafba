"""Ranks that come apart."""

from __future__ import annotations

import keras
import numpy as np

from tests.models.gpt_programs import build, scope, text
from tfdist import callbacks


def differences(mesh: dict, spoilt: list[dict[int, str]]) -> list[str]:
    """What is said where some ranks have changed a variable; "" where nothing is said.

    Args:
        mesh: The mesh.
        spoilt: For each case, by rank, the end of the path of the variable that it changes.
    """
    from tfdist import layers
    from tfdist.addons.monitoring import model_sync

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with scope(mesh):
        model = build()
        model.compile("adam", layers.VocabParallelCrossEntropy(61))
    rank = model.distribute_strategy.mesh.rank
    callback = callbacks.VerifyModelSync(every_steps=2)
    model.fit(*text(16, 61), batch_size=8, epochs=2, verbose=0, callbacks=[callback])
    found = []
    for case in spoilt:
        ends = [case[rank]] if rank in case else []
        hit = [v for v in model.variables if any(v.path.endswith(end) for end in ends)][:1]
        before = [variable.numpy() for variable in hit]
        for variable, value in zip(hit, before, strict=True):
            other = value.copy()
            np.ravel(other)[0] += 1e-6
            variable.assign(other)
        try:
            model_sync.verify_model_sync(model)
            found.append("")
        except model_sync.ModelSyncError as error:
            found.append(str(error))
        for variable, value in zip(hit, before, strict=True):
            variable.assign(value)
    return found
