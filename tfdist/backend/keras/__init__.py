"""The private names of Keras that tfdist uses, each with a check."""

import keras
import tensorflow as tf

from tfdist.runtime.versions import VersionError, check_version

# Before the modules here import names that other versions do not have.
check_version("tensorflow", tf.__version__)
check_version("keras", keras.__version__)

from tfdist.backend.keras.patching import moved  # noqa: E402

try:
    from tfdist.backend.keras import private as _private  # noqa: F401
except VersionError:
    raise
except ImportError as error:
    # A version that is allowed by `TFDIST_ANY_VERSION`, in which a name was moved.
    raise moved(error.name or "keras.src", error) from None
