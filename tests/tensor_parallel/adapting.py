"""Quantized bases and adapters on split models: the bytes that a rank holds, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np

from tests.tensor_parallel.families import scope

__all__ = ["REFUSED", "SIZES", "bytes_held", "logits_in_half", "refused"]

#: Of the model whose bytes are counted.
SIZES = {
    "vocabulary_size": 256,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 64,
    "intermediate_dim": 128,
    "tie_word_embeddings": True,
}
SMALL = SIZES | {"vocabulary_size": 17, "num_layers": 1, "hidden_dim": 8, "intermediate_dim": 16}


def parallelize(model, plan=None):
    from tfdist.tensor_parallel import parallelize as split

    return split(model, plan)


def llama(**changes):
    import keras_hub

    backbone = keras_hub.models.LlamaBackbone(**(SMALL | changes))
    return keras_hub.models.LlamaCausalLM(backbone=backbone, preprocessor=None)


def is_product(layer) -> bool:
    return isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense))


def quantize(model, mode: str, block_size: int | None = None) -> None:
    config = None
    if mode == "int4":
        config = keras.quantizers.Int4QuantizationConfig(block_size=block_size)
    model.backbone.quantize(mode, config=config, filters=is_product)


def bytes_held(mode: str, block_size: int | None, rank: int, options: dict | None) -> int:
    """The bytes of this rank's weights and of its optimizer's state, after a step of Adam."""
    from tfdist.backend.keras.attributes import stored_value

    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    with scope(options):
        model = llama(**SIZES)
        quantize(model, mode, block_size)
        model.backbone.enable_lora(rank)
        if options:
            parallelize(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.Adam(), loss=loss, weighted_metrics=None)
    ids = np.ones((2, 6), "int32")
    model.fit({"token_ids": ids, "padding_mask": ids}, ids, verbose=0)
    values = [stored_value(v) for v in (*model.weights, *model.optimizer.variables)]
    return sum(int(np.prod(value.shape)) * value.dtype.size for value in values)


def logits_in_half(mode: str, dtype: str, options: dict | None) -> np.ndarray:
    """The logits of a quantized model with LoRA that computes in 16 bits."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    with scope(options):
        model = llama(dtype=dtype)
        quantize(model, mode)
        model.backbone.enable_lora(2)
        if options:
            parallelize(model)
    ids = np.ones((2, 6), "int32")
    return np.asarray(model({"token_ids": ids, "padding_mask": ids}), "float32")


def _quantized(mode: str, *, block_size: int | None = None, after: bool = False, **changes):
    def build():
        model = llama(**changes)
        if after:
            parallelize(model)
        if mode in ("gptq", "awq"):
            kind = {"gptq": keras.quantizers.GPTQConfig, "awq": keras.quantizers.AWQConfig}[mode]
            config = kind(dataset=["text"], tokenizer=str.split, weight_bits=4)
            # The model's own method would also calibrate it, on a text.
            for layer in filter(is_product, model.backbone._flatten_layers()):
                layer.quantize(mode, config=config)
        else:
            quantize(model, mode, block_size)
        if not after:
            parallelize(model)

    return build


def _adapted(*ranks) -> Callable[[], None]:
    def build():
        model = llama()
        parallelize(model)
        for rank in ranks:
            model.backbone.enable_lora(rank)

    return build


def _twice():
    from tfdist.tensor_parallel.plan import LLAMA

    model = llama(tie_word_embeddings=True)
    parallelize(model)
    parallelize(model)  # Without a plan this changes nothing.
    parallelize(model, LLAMA)


def _as_a_vocabulary():
    model = llama()
    parallelize(
        model, {".*feedforward_output_dense/kernel": "vocabulary", ".*norm/scale": "column"}
    )


_MODES = (
    "int8 or int4",
    "`transformer_layer_0/",
    "Use 'replicate' for it, or another quantization",
)
_DIVIDES = (
    "must be divisible by the size of the tensor axis",
    "with tensor=2",
    "Use a smaller tensor axis, or a plan",
)
_IN_LAYER = "in `transformer_layer_0/"

#: By name: what is done on ranks of tensor=2, and what the message holds: the layer, and the way out.
REFUSED: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    **{
        f"{mode} {'after' if after else 'before'}": (
            _quantized(mode, after=after),
            (f"'{mode}'", *_MODES),
        )
        for mode in ("float8", "gptq", "awq")
        for after in (False, True)
    },
    "blocks that do not divide": (
        _quantized("int4", block_size=3),
        (
            "16 inputs and block_size=3",
            f"{_IN_LAYER}feedforward_output_dense`",
            "a block_size that",
        ),
    ),
    "blocks that do not divide, after": (
        _quantized("int4", block_size=3, after=True),
        (
            "16 inputs and block_size=3",
            f"{_IN_LAYER}feedforward_output_dense`",
            "a block_size that",
        ),
    ),
    "one block for two ranks": (
        _quantized("int4", block_size=8),
        ("number of blocks (block_size=8)", "Received: 1", f"{_IN_LAYER}self_attention", *_DIVIDES),
    ),
    "an odd number of columns": (
        _quantized("int4", block_size=-1, intermediate_dim=9),
        ("Received: 9", "an even number", f"{_IN_LAYER}feedforward", "quantize it to int8"),
    ),
    "an odd number of columns on a rank": (
        _quantized("int4", block_size=-1, intermediate_dim=10),
        ("Half the number of outputs", "Received: 5", f"{_IN_LAYER}feedforward", *_DIVIDES),
    ),
    "heads": (
        _quantized("int8", num_query_heads=3, num_key_value_heads=3, hidden_dim=12),
        ("num_query_heads=3", f"{_IN_LAYER}self_attention`", *_DIVIDES),
    ),
    "heads of keys": (
        _quantized("int8", num_query_heads=6, num_key_value_heads=3, hidden_dim=12),
        ("num_key_value_heads=3", f"{_IN_LAYER}self_attention`", *_DIVIDES),
    ),
    "units": (
        _quantized("int8", intermediate_dim=15),
        ("Received: 15", f"{_IN_LAYER}feedforward_", *_DIVIDES),
    ),
    "a vocabulary of a norm": (
        _as_a_vocabulary,
        ("'column' for `", "norm/scale`", "Dense, EinsumDense and Embedding layers"),
    ),
    "split twice": (_twice, ("/kernel` cannot be split twice", "a plan with")),
    "LoRA twice": (
        _adapted(2, 3),
        (
            "cannot get LoRA twice",
            "rank=3 for `transformer_layer_0/self_attention/",
            "LoRA of rank 2",
        ),
    ),
    "a rank of 0": (_adapted(0), ("`rank`", "Received: rank=0")),
    "a rank that is no number": (_adapted(2.5), ("`rank`", "Received: rank=2.5")),
}


def refused(names: list[str], options: dict) -> dict[str, str]:
    """What is said in some of the cases."""
    found = {}
    for name in names:
        build, _ = REFUSED[name]
        keras.backend.clear_session()
        keras.utils.set_random_seed(5)
        try:
            with scope(options):
                build()
        except (ValueError, TypeError) as error:
            found[name] = str(error)
        else:
            found[name] = "accepted"
    return found
