"""`tfdist-train`: trains the reference models."""
