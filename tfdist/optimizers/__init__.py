"""What optimizers need on many ranks: learning rates that fit the global batch."""

from tfdist.optimizers.learning_rate import ScaledWarmup, scaled_learning_rate

__all__ = ["ScaledWarmup", "scaled_learning_rate"]
