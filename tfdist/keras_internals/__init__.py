"""All that tfdist uses of Keras beyond its public interface, each with a check."""
