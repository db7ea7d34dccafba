"""Reference models and the transformer block: what the launchers train and the benchmarks measure."""

if __name__ != "tfdist.models":
    raise ImportError("This package is imported as `tfdist.models`, not as `models`.")


from tfdist.models.convnet import convnet
from tfdist.models.generation import generate
from tfdist.models.gpt import gpt
from tfdist.models.mlp import mlp
from tfdist.models.transformer import TransformerDecoderBlock

__all__ = ["TransformerDecoderBlock", "convnet", "generate", "gpt", "mlp"]
