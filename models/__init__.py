"""Reference models and the transformer block, which launchers train and benchmarks measure."""

if __name__ != "tfdist.models":
    raise ImportError("This package must be imported as `tfdist.models`, not as `models`.")


from tfdist.models.convnet import convnet
from tfdist.models.generation import generate
from tfdist.models.gpt import gpt
from tfdist.models.mlp import mlp
from tfdist.models.transformer import TransformerDecoderBlock

__all__ = ["TransformerDecoderBlock", "convnet", "generate", "gpt", "mlp"]
