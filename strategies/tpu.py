"""TPUs: TensorFlow's strategy for them, resolved and initialized."""

from __future__ import annotations

import tensorflow as tf

from tfdist.runtime.versions import why_no_tpu
from tfdist.utils import checks
from tfdist.utils.errors import TfdistError
from tfdist.utils.untested import say_untested


class NoTPUError(TfdistError, RuntimeError):
    """There is no TPU with the given name, or it does not respond."""


def tpu(name: str = "local") -> tf.distribute.TPUStrategy:
    """Finds a TPU, initializes it, and returns a strategy for its cores.

    The cores of a TPU are devices of one process, which TensorFlow and XLA synchronize: tfdist's engines and
    meshes are not used. Keras trains under the strategy as under any other of `tf.distribute`. Compute in
    "mixed_bfloat16", use batches of one size (`drop_remainder=True`), and run many steps per execution
    (`compile(steps_per_execution=...)`).

    Call it before any other use of TensorFlow in the process: initializing a TPU clears the state of the
    runtime. tfdist's tests have no TPU, and replace its devices by fakes. The last build of TensorFlow for TPUs is
    2.20, in the package `tensorflow-tpu`.

    Args:
        name: The name of a Cloud TPU, its address such as "grpc://10.0.0.2:8470", or "local" on the machine
            of the TPU.

    Raises:
        ValueError: The name is not a non-empty string.
        NoTPUError: There is no such TPU, or this TensorFlow has no build for TPUs.
    """
    checks.text("name", name)
    if why := why_no_tpu(tf.__version__):
        raise NoTPUError(f"TPU {name!r} cannot be used: {why}")
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        strategy = tf.distribute.TPUStrategy(resolver)
    except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
        said = checks.one_line(error)
        raise NoTPUError(f"TPU {name!r} not found: {type(error).__name__}: {said}") from error
    say_untested("a TPU")
    return strategy
