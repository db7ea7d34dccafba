"""The program and the command that train a model with a layout."""

from __future__ import annotations

import json
import shlex
import textwrap
from typing import Any

from tfdist.addons.planner.layouts import FOREIGN, Layout
from tfdist.addons.planner.models import Transformer
from tfdist.addons.planner.parts import Model
from tfdist.utils import checks

#: Longer calls are split over several lines.
_LINE = 92
#: The class of `keras.optimizers` and its arguments, by the planner's name.
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "adafactor": ("Adafactor", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "rmsprop": ("RMSprop", {}),
    "lion": ("Lion", {}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "lamb": ("Lamb", {}),
}


def refusal(layout: Layout) -> str | None:
    """The reason why tfdist cannot run a layout, as text; None if it can."""
    if layout.dtype in FOREIGN:
        return (
            f"--dtype={layout.dtype} is not supported for training: it is the mixed precision of "
            f"{FOREIGN[layout.dtype]}, with a float32 copy of the weights in the optimizer. tfdist trains in "
            "float32, mixed_bfloat16, mixed_float16, bfloat16 or float16."
        )
    return None


def gpt_arguments(model: Transformer) -> dict[str, Any]:
    """The arguments of `tfdist.models.gpt` for a model of these sizes, except the vocabulary size."""
    arguments: dict[str, Any] = {
        "num_layers": model.layers,
        "width": model.width,
        "num_heads": model.heads,
    }
    own = {
        "num_key_value_heads": (model.kv_heads, None),
        "head_dim": (model.head_dim, None),
        "hidden_dim": (model.hidden, None),
        "max_length": (model.length, None),
        "activation": ("swiglu" if model.gated else "gelu", "gelu"),
        "positions": ("learned" if model.learned_positions else "rotary", "learned"),
        "tied_head": (model.tied, True),
        "dropout": (0.1 if model.dropout else 0.0, 0.0),
        "use_bias": (model.use_bias, True),
        "normalization": ("layer" if model.norm_bias else "rms", "layer"),
        "num_experts": (model.experts, None),
        "top_k": (model.top_k if model.experts else 2, 2),
    }
    return arguments | {name: value for name, (value, usual) in own.items() if value != usual}


def code(model: Model, layout: Layout, *, global_batch: int, preset: str | None = None) -> str:
    """Generate a program that trains a model with a layout.

    The program builds a `Transformer`; for other models it calls the user's function `build`. The
    data are the user's variables `x` and `y`.

    Args:
        model: The model.
        layout: The layout.
        global_batch: Samples of an update, over all ranks.
        preset: Folder of a KerasHub preset to load the model from; None for a new model.

    Raises:
        ValueError: The layout has the mixed precision of another system.
    """
    checks.integer("global_batch", global_batch, minimum=1)
    if why := refusal(layout):
        raise ValueError(f"`layout` must have a dtype of tfdist: {why} Received: {layout.dtype!r}.")
    lines = ["import keras", "import tfdist", ""]
    if layout.dtype != "float32":
        lines.append(f'keras.config.set_dtype_policy("{layout.dtype}")')
    axes = ", ".join(f"{axis}={size}" for axis, size in layout.used_axes.items())
    options = f", zero_stage={layout.zero_stage}" if layout.zero_stage else ""
    lines += [
        f"strategy = tfdist.strategies.auto(tfdist.Mesh({axes}){options})",
        "with strategy.scope():",
        textwrap.indent("\n".join(_build(model, layout, preset)), "    "),
        f"model.fit(x, y, batch_size={global_batch // layout.accumulation})  # Of all ranks.",
    ]
    return "\n".join(lines)


def _build(model: Model, layout: Layout, preset: str | None) -> list[str]:
    if preset is not None:
        options = {"preprocessor": None, "compile": False}
        lines = [_call("model = tfdist.load_preset", [json.dumps(preset)], options)]
        lines.append("vocabulary = model.output.shape[-1]")
        loss = "tfdist.layers.VocabParallelCrossEntropy(vocabulary)"
    elif isinstance(model, Transformer):
        arguments = gpt_arguments(model)
        if layout.sequence_parallel and layout.tensor > 1:
            arguments["sequence_parallel"] = True
        if model.experts:
            # Balancing over a sequence does not depend on micro-batches and ranks.
            arguments["experts"] = {"balance_over": "sequence"}
        lines = [_call("model = tfdist.models.gpt", [f"{model.vocabulary}"], arguments)]
        loss = f"tfdist.layers.VocabParallelCrossEntropy({model.vocabulary})"
    else:
        lines, loss = ["model = build()"], "loss"
    if layout.recompute != "none":
        lines.append(f'tfdist.recompute.recompute(model, "{layout.recompute}")')
    if layout.pipeline > 1:
        arguments = {"num_microbatches": layout.num_microbatches, "schedule": layout.schedule}
        if layout.chunks > 1:
            arguments["chunks"] = layout.chunks
        if isinstance(model, Transformer):
            arguments["input_shape"] = (model.length,)
        lines.append(_call("model = tfdist.pipeline.PipelineModel", ["model"], arguments))
    name, arguments = _OPTIMIZERS[layout.optimizer]
    if layout.ema:
        arguments = {**arguments, "use_ema": True}
    if layout.accumulation > 1:
        arguments = {**arguments, "gradient_accumulation_steps": layout.accumulation}
    lines.append(_call(f"optimizer = keras.optimizers.{name}", [], arguments))
    if layout.dtype == "float16":
        # Keras scales the loss automatically under mixed_float16 only.
        lines.append("optimizer = keras.optimizers.LossScaleOptimizer(optimizer)")
    # The default metric of a task requires unsharded logits.
    more = ", weighted_metrics=None" if preset is not None and layout.pipeline == 1 else ""
    lines.append(f"model.compile(optimizer, {loss}{more})")
    return lines


def _call(function: str, positional: list[str], arguments: dict[str, Any]) -> str:
    """The source of a call, split over lines if it is long."""
    given = [*positional, *(f"{name}={_literal(value)}" for name, value in arguments.items())]
    short = f"{function}({', '.join(given)})"
    if len(short) <= _LINE:
        return short
    return "\n".join([f"{function}(", *(f"    {each}," for each in given), ")"])


def _literal(value: Any) -> str:
    """The Python literal of a value, with double quotes."""
    return repr(value).replace("'", '"')


def layout_flags(layout: Layout) -> list[str]:
    """The flags of `tfdist-train` and `tfdist-finetune` for a layout."""
    found = [f"--{axis}={size}" for axis, size in layout.used_axes.items()]
    if layout.pipeline > 1:
        found += [f"--num_microbatches={layout.num_microbatches}", f"--schedule={layout.schedule}"]
        found += [f"--chunks={layout.chunks}"] if layout.chunks > 1 else []
    if layout.zero_stage:
        found.append(f"--zero_stage={layout.zero_stage}")
    if layout.recompute != "none":
        found.append(f"--recompute={layout.recompute}")
    if layout.sequence_parallel and layout.tensor > 1:
        found.append("--sequence_parallel")
    return found


def command_line(model_flags: list[str], layout: Layout, *, global_batch: int) -> str:
    """Generate the command that trains a model with a layout.

    Args:
        model_flags: The program and the flags of its model: `tfdist-train`, `--model=gpt`, ...
        layout: The layout.
        global_batch: Samples of an update, over all ranks.

    Raises:
        ValueError: The layout has the mixed precision of another system.
    """
    if why := refusal(layout):
        raise ValueError(f"`layout` must have a dtype of tfdist: {why} Received: {layout.dtype!r}.")
    kind, arguments = _OPTIMIZERS[layout.optimizer]
    words = [
        *("tfdist-run", "-np", str(layout.ranks), "--"),
        *model_flags,
        f"--batch_size={global_batch // layout.accumulation}",
        *layout_flags(layout),
        f"--dtype_policy={layout.dtype}",
        f"--optimizer={kind.lower()}",
        *(f"--{name}={value}" for name, value in arguments.items()),
    ]
    words += [f"--accumulate={layout.accumulation}"] if layout.accumulation > 1 else []
    words += ["--ema=0.99"] if layout.ema else []
    return shlex.join(words)
