"""KerasHub's families in small: fine-tuned whole, and split by a plan that is found."""

from __future__ import annotations

import contextlib

import keras
import numpy as np

from tests.parity import families
from tests.parity.families import LENGTH, WORDS, classifier, rows_for
from tests.parity.feeding import Feed
from tfdist.backend.keras.private import all_layers
from tfdist.tensor_parallel import blockwise

__all__ = ["DECODERS", "generated", "train"]

#: Those whose task makes text.
DECODERS = [
    "GPT2",
    "OPT",
    "Bloom",
    "Falcon",
    "Llama",
    "Llama3",
    "Mistral",
    "Phi3",
    "Gemma",
    "Gemma2",
    "Gemma3",
    "Qwen",
    "Qwen3",
    "Mixtral",
    "QwenMoe",
    "Qwen3Moe",
    "GptOss",
    "SharedKeys",
]
#: As Gemma 2B: one head of keys and values, which each rank has.
_SHARED_KEYS = {"SharedKeys": families.FAMILIES["Gemma"] | {"num_key_value_heads": 1}}
_FAMILIES = families.FAMILIES | _SHARED_KEYS
_CLASSES = families._CLASSES | {"SharedKeys": "Gemma"}
STEPS, ROWS = 10, 6
FEW = blockwise._FEW


def scope(options: dict | None):
    """The scope of a strategy over this rank's engine, or none."""
    if options is None:
        return contextlib.nullcontext()
    from tfdist import Mesh
    from tfdist.testing import strategy

    options = dict(options)
    return strategy(Mesh(**options.pop("mesh", {})), **options).scope()


@contextlib.contextmanager
def policy(dtype: str):
    """Inside, models are made under a policy of Keras'."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def configuration(name: str, tensor: int) -> dict:
    """With heads for four tensor ranks where it takes them."""
    found = dict(_FAMILIES[name])
    if "num_experts" in found:
        found["num_experts"] = 4
    if tensor == 4:
        wanted = {"num_heads": 4, "num_attention_heads": 4, "num_query_heads": 8}
        if name not in _SHARED_KEYS:
            wanted["num_key_value_heads"] = 4
        wanted["hidden_dim"] = 16
        found |= {key: value for key, value in wanted.items() if key in found}
    return found


def causal_lm(
    name: str, tensor: int = 2, length: int | None = None, compiled: bool = True, **changes
):
    """The task of a family that makes text; `changes` are for the backbone."""
    import keras_hub

    found = configuration(name, tensor) | changes
    if length and "max_sequence_length" in found:
        found["max_sequence_length"] = length
    prefix = _CLASSES.get(name, name)
    backbone = getattr(keras_hub.models, f"{prefix}Backbone")(**found)
    task = getattr(keras_hub.models, f"{prefix}CausalLM")
    return task(backbone=backbone, preprocessor=None, compile=compiled)


def blocks_of_four():
    """int4 with blocks that small layers have several of."""
    return keras.quantizers.Int4QuantizationConfig(block_size=4)


def changed(model, name: str, tensor: int, lora: str | None, quantize: str | None, rank: int = 2):
    """A model as it is fine-tuned: quantized, with LoRA, and split where there are tensor ranks."""
    import tfdist

    backbone = getattr(model, "backbone", None) or model
    if quantize:
        config = blocks_of_four() if quantize == "int4" else None
        backbone.quantize(quantize, config=config)
    if lora == "before":
        backbone.enable_lora(rank)
    if tensor > 1:
        tfdist.parallelize(model)
    if lora == "after":
        backbone.enable_lora(rank)
    return model


def widen_softmax(model: keras.Model) -> None:
    """Has softmax in float64, which KerasHub computes in float32 whatever the policy."""
    for layer in all_layers(model):
        if isinstance(layer, keras.layers.Softmax):
            layer.dtype_policy = "float64"


def train(
    name: str,
    options: dict | None = None,
    lora=None,
    quantize=None,
    tensor: int = 2,
    order: str = "given",
    in_blocks: bool = False,
    rank: int = 2,
    rows: int = ROWS,
    dtype: str = "float32",
):
    """Ten steps of SGD, with the rows of the batch in one of `ORDERS`.

    Args:
        name: The family.
        options: The mesh and what a strategy takes; None for plain KerasHub.
        lora: None, or whether LoRA comes "before" or "after" the split.
        quantize: None, or the mode of the base.
        tensor: For how many tensor ranks heads are to divide.
        order: Of the rows.
        in_blocks: Whether split attention goes by blocks, however short the sequences are.
        rank: Of LoRA.
        rows: Of the batch.
        dtype: The policy that the model is made under; it stays Keras' own for others.

    Returns:
        The losses, and the weights by place and path.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    blockwise._FEW = 0 if in_blocks else FEW
    mesh = (options or {}).get("mesh", {})
    with scope(options):
        if name in DECODERS:
            with policy(dtype):
                model = causal_lm(name, tensor)
            if dtype == "float64":
                widen_softmax(model)
            random = np.random.default_rng(0)
            ids = random.integers(1, WORDS, (rows, LENGTH)).astype("int32")
            mask = (np.arange(LENGTH) < random.integers(3, LENGTH + 1, rows)[:, None]).astype(
                "int32"
            )
            x, y = {"token_ids": ids, "padding_mask": mask}, np.roll(ids, -1, axis=1)
        else:
            model = classifier(name)
            x, y = rows_for(name, rows), np.random.default_rng(0).integers(0, 3, rows)
        most = max(mesh.get("tensor", 1), mesh.get("expert", 1))
        changed(model, name, most, lora, quantize, rank)
        # Keras' losses are of float32 whatever the model is of.
        of_loss = "float64" if dtype == "float64" else None
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype=of_loss)
        model.compile(optimizer=keras.optimizers.SGD(0.05), loss=loss, weighted_metrics=None)
    data = Feed("data", rows, rows, order).batches(x, y).repeat()
    history = model.fit(data, steps_per_epoch=1, epochs=STEPS, verbose=0)
    return history.history["loss"], whole(model.weights)


def whole(variables) -> dict[str, np.ndarray]:
    """The global arrays."""
    from tfdist.sharding import whole_value

    return {f"{i}/{v.path}": whole_value(v).numpy() for i, v in enumerate(variables)}


def generated(name: str, options: dict | None = None, tensor: int = 2) -> dict[str, np.ndarray]:
    """What a family makes of two prompts, by sampler."""
    import keras_hub

    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    mesh = (options or {}).get("mesh", {})
    prompts = np.zeros((2, 12), "int32")
    prompts[:, :3] = [[3, 4, 5], [7, 8, 2]]
    inputs = {"token_ids": prompts, "padding_mask": prompts > 0}
    if name == "Gemma3":
        # Without any, KerasHub joins the None that it returns for the images of batches.
        inputs["images"] = np.zeros((2, 0, 1, 1, 3), "float32")
    found = {}
    with scope(options):
        model = causal_lm(name, tensor, length=12)
        for place, variable in enumerate(model.trainable_variables):
            # Sharp logits, so that rounding changes no choice.
            variable.assign(np.random.default_rng(place).normal(0, 0.5, variable.shape))
        changed(model, name, mesh.get("tensor", 1), None, None)
        for sampler in (
            keras_hub.samplers.GreedySampler(),
            keras_hub.samplers.TopKSampler(k=5, seed=3),
            keras_hub.samplers.TopPSampler(p=0.8, k=5, seed=3),
            keras_hub.samplers.BeamSampler(num_beams=2),
        ):
            model.compile(sampler=sampler)
            if (name, type(sampler).__name__) == ("Gemma3", "BeamSampler"):
                # On one process too KerasHub raises: it slices a mask of rows as if of beams.
                continue
            tokens = model.generate(inputs, stop_token_ids=None)["token_ids"]
            found[type(sampler).__name__] = np.array(tokens)
    return found
