"""The options of the optimizer, of wrappers of its update, and of dtypes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from tfdist.addons.planner.quantities import read_bytes
from tfdist.launch.flags.options import as_given, names, option, refuse_ignored
from tfdist.launch.flags.values import UsageError, refuse
from tfdist.utils.lazy import find_addon

#: The class of `keras.optimizers`, by the value of the flag.
_OPTIMIZERS = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "adafactor": "Adafactor",
    "lamb": "Lamb",
    "lion": "Lion",
    "rmsprop": "RMSprop",
}
_POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")
_LARGEST_SCALE = 2.0**40
_RECOMPUTE = ("none", "selective", "sqrt", "every_layer", "optimal")


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """The options of the optimizer and of dtypes; see the flags of the same names."""

    optimizer: str = option(
        "own", "Optimizer; own: adam, and adamw for gpt", choices=["own", *_OPTIMIZERS]
    )
    momentum: float = option(0.0, "Momentum of sgd", least=0.0, most=0.999999)
    weight_decay: float | None = option(
        None, "Decoupled weight decay; 0: none [gpt: 0.1]", least=0.0, most=100.0
    )
    clip_norm: float | None = option(
        None, "Norm that gradients are clipped to; 0: none [gpt: 1]", least=0.0, most=1e9
    )
    ema: float | None = option(
        None,
        "Momentum of a moving average of weights, which replaces them at the end",
        least=0.0,
        most=0.999999,
    )
    accumulate: int = option(
        1, "Steps whose gradients are accumulated per update", least=1, most=1 << 20
    )
    dtype_policy: str | None = option(
        None, "Dtype policy of the model", choices=_POLICIES, shown="float32"
    )
    loss_scale: str = option("auto", "A number, none, or auto: dynamic with (mixed_)float16")

    @property
    def averages(self) -> bool:
        """Whether a moving average replaces the weights at the end of training."""
        return self.ema is not None

    def check(self, *, is_tpu: bool, has_sync: bool) -> None:
        """Check the options before the rendezvous of the ranks.

        Args:
            is_tpu: Whether a TPU is requested.
            has_sync: Whether ranks train with local steps (`--sync_every`).

        Raises:
            UsageError: Options are incompatible.
        """
        self._fixed_scale()
        if self.optimizer != "sgd":
            given = f"--optimizer={self.optimizer}"
            refuse_ignored(self, ["momentum"], "requires --optimizer=sgd", given)
        if is_tpu:
            why = "is not supported on a TPU, which computes in mixed_bfloat16"
            refuse_ignored(self, ["dtype_policy", "loss_scale"], why, "with a TPU")
        if has_sync and self.averages:
            raise UsageError(
                "--ema is not supported with --sync_every, because weights differ between ranks. "
                f"Received: --ema={self.ema} with --sync_every."
            )
        if has_sync and self._fixed_scale() is not None:
            raise UsageError(
                "--sync_every requires a dynamic loss scale or none. Received: "
                f"--loss_scale={self.loss_scale} with --sync_every."
            )

    def _fixed_scale(self) -> float | None:
        """The number of --loss_scale; None for auto and none."""
        text = self.loss_scale
        if text in ("auto", "none"):
            return None
        try:
            scale = float(text)
        except ValueError:
            scale = math.nan
        if not 0 < scale <= _LARGEST_SCALE:  # False for NaN too.
            meaning = f"auto, none, or a number above 0 and at most {_LARGEST_SCALE:g}"
            raise refuse("loss_scale", text, meaning)
        return scale

    @property
    def policy(self) -> str | None:
        """The dtype policy; None for the default, or for that of the model."""
        return None if self.dtype_policy == "own" else self.dtype_policy

    def set_policy(self) -> None:
        """Set the dtype policy of layers created afterwards."""
        import keras

        keras.config.set_dtype_policy(self.policy or "float32")

    def planned(self, own: str) -> dict[str, Any]:
        """The arguments of `tfdist.addons.planner.Limits` for these options.

        Args:
            own: The class name of the task's optimizer in `keras.optimizers`.
        """
        optimizer = _OPTIMIZERS.get(self.optimizer, own).lower()
        return {
            "optimizer": "momentum" if optimizer == "sgd" and self.momentum else optimizer,
            "ema": self.averages,
            "dtype": self.policy or "float32",
            "accumulation": self.accumulate,
        }

    def make(self, own: str, rate: Any, *, undecayed: Sequence[str] = (), **arguments: Any) -> Any:
        """Create the optimizer of a task, with the changes of the options.

        Args:
            own: The class name of the task's optimizer in `keras.optimizers`.
            rate: The learning rate, or a schedule.
            undecayed: Suffixes of the names of variables without weight decay.
            **arguments: The task's arguments of the optimizer.
        """
        import keras

        name = _OPTIMIZERS.get(self.optimizer, own)
        if name != own:
            # Only arguments that all optimizers support are kept, unlike the betas of Adam.
            shared = ("weight_decay", "global_clipnorm")
            arguments = {key: arguments[key] for key in shared if key in arguments}
        for value, argument in (
            (self.weight_decay, "weight_decay"),
            (self.clip_norm, "global_clipnorm"),
        ):
            if value is not None:
                arguments[argument] = value or None
        if self.momentum:
            arguments["momentum"] = self.momentum
        if self.ema is not None:
            arguments |= {"use_ema": True, "ema_momentum": self.ema}
        if self.accumulate > 1:
            arguments["gradient_accumulation_steps"] = self.accumulate
        scale = self._fixed_scale()
        if scale is not None:
            arguments["loss_scale_factor"] = scale
        addon = find_addon("optimizers")
        home = addon if addon is not None and name in addon.__all__ else keras.optimizers
        optimizer = getattr(home, name)(rate, **arguments)
        if undecayed and optimizer.weight_decay:
            optimizer.exclude_from_weight_decay(var_names=list(undecayed))
        return optimizer

    def scaled(self, optimizer: Any) -> Any:
        """Add loss scaling to an optimizer under float16; `compile` adds it under mixed_float16."""
        import keras

        if self.policy == "float16" and self.loss_scale == "auto":
            return keras.optimizers.LossScaleOptimizer(optimizer)
        return optimizer

    @property
    def compile_options(self) -> dict[str, Any]:
        """Further arguments of `compile`: whether it scales the loss automatically."""
        return {"auto_scale_loss": self.loss_scale == "auto"}

    @contextlib.contextmanager
    def expected_errors(self) -> Iterator[None]:
        """Convert errors of a strategy or an optimizer about these options into a `UsageError`."""
        try:
            yield
        except (ValueError, NotImplementedError) as error:
            given = as_given(self, names(self))
            if not given:
                raise
            raise UsageError(f"{given} is not supported: {error}") from error


@dataclasses.dataclass(frozen=True)
class PresetOptimizerOptions(OptimizerOptions):
    """The options for models with their own dtype policy, which are trained with AdamW."""

    optimizer: str = option("own", "Optimizer; own: adamw", choices=["own", *_OPTIMIZERS])
    dtype_policy: str | None = option(
        None,
        "Dtype policy of the model; own: the preset's",
        choices=["own", *_POLICIES],
        shown="own",
        former="dtype",
    )


def read_recompute(flag: str, value: str) -> dict[str, Any]:
    """Parse the value of a recompute flag: a policy, or a budget such as budget:2GiB.

    Returns:
        The arguments of `recompute`; empty for "none".

    Raises:
        UsageError: The value is neither.
    """
    if value in _RECOMPUTE:
        return {} if value == "none" else {"policy": value}
    kind, _, size = value.partition(":")
    with contextlib.suppress(ValueError):
        if kind == "budget":
            return {"policy": "budget", "budget": float(read_bytes(size))}
    raise refuse(flag, value, f"{', '.join(_RECOMPUTE)}, or budget:SIZE such as budget:2GiB")


def counted_for(arguments: dict[str, Any], rows: int, input_shape: Any) -> dict[str, Any]:
    """Add the input shape to the arguments of `recompute` for policies that count bytes.

    Args:
        arguments: The result of `read_recompute`.
        rows: Rows of a micro-batch on a rank.
        input_shape: The shape of a row.
    """
    if arguments["policy"] not in ("budget", "optimal"):
        return arguments
    return {**arguments, "rows": rows, "input_shape": input_shape}
