"""All that tfdist uses of Keras beyond its public interface, each with a check."""

import keras
import tensorflow as tf

from tfdist.runtime.versions import VersionError, check_version

# Before the modules here import what another version has not.
check_version("tensorflow", tf.__version__)
check_version("keras", keras.__version__)

from tfdist.backend.keras.patching import moved  # noqa: E402

try:
    from tfdist.backend.keras import private as _private  # noqa: F401
except VersionError:
    raise
except ImportError as error:
    # A version that `TFDIST_ANY_VERSION` lets in, and that has a name elsewhere.
    raise moved(error.name or "keras.src", error) from None
