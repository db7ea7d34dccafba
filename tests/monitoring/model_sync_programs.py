"""Ranks that come apart."""

from __future__ import annotations

import keras
import numpy as np

from tests.layers.gpt_programs import build, scope, text


def differences(mesh: dict, spoilt: dict[int, str]) -> str:
    """What is said where some ranks have changed a variable; "" where nothing is said.

    Args:
        mesh: The mesh.
        spoilt: By rank, the end of the path of the variable that it changes.
    """
    from tfdist import layers, monitoring

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with scope(mesh):
        model = build()
        model.compile("adam", layers.VocabParallelCrossEntropy(61))
    rank = model.distribute_strategy.mesh.rank
    callback = monitoring.VerifyModelSync(every_steps=2)
    model.fit(*text(16, 61), batch_size=8, epochs=2, verbose=0, callbacks=[callback])
    for variable in (*model.variables, *model.optimizer.variables):
        if rank in spoilt and variable.path.endswith(spoilt[rank]):
            value = variable.numpy()
            np.ravel(value)[0] += 1e-6
            variable.assign(value)
            break
    try:
        monitoring.verify_model_sync(model)
    except monitoring.ModelSyncError as error:
        return str(error)
    return ""
