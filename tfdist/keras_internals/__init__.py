"""All that tfdist uses of Keras beyond its public interface, each with a check."""

import keras
import tensorflow as tf

from tfdist.runtime.versions import check_version

# Before the modules here import what another version has not.
check_version("tensorflow", tf.__version__)
check_version("keras", keras.__version__)
