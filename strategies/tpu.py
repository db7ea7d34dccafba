"""TPUs: TensorFlow's own strategy for them, resolved and initialized."""

from __future__ import annotations

import tensorflow as tf

from tfdist.utils import checks
from tfdist.utils.errors import TfdistError
from tfdist.utils.untested import say_untested


class NoTPUError(TfdistError, RuntimeError):
    """There is no TPU of that name, or it does not answer."""


def tpu(name: str = "local") -> tf.distribute.TPUStrategy:
    """Finds a TPU, starts it, and returns a strategy for its cores.

    A TPU's cores are one process's devices, which TensorFlow and XLA keep together: tfdist's engines
    and meshes have no part in it. Keras trains under the strategy as under any other of
    `tf.distribute`; compute in "mixed_bfloat16", give batches of one size (`drop_remainder=True`),
    and run many steps at a time (`compile(steps_per_execution=...)`).

    Call it before any other use of TensorFlow in the process: starting a TPU clears the state of
    the runtime. Up to the devices' border it is tested against fakes: tfdist's tests have no TPU.

    Args:
        name: The name of a Cloud TPU, its address as "grpc://10.0.0.2:8470", or "local" on the
            TPU's own machine.

    Raises:
        ValueError: The name is empty, or no text.
        NoTPUError: There is none.
    """
    checks.text("name", name)
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        strategy = tf.distribute.TPUStrategy(resolver)
    except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
        said = checks.one_line(error)
        raise NoTPUError(f"There is no TPU {name!r}: {type(error).__name__}: {said}") from error
    say_untested("a TPU")
    return strategy
