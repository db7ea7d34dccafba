"""The flags of the optimizer, of wrappers of its update, and of dtypes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from tfdist.launch.flags.values import (
    FlagDefiner,
    UsageError,
    as_given,
    refuse,
    refuse_ignored,
)
from tfdist.utils.quantities import read_bytes

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


class OptimizerFlags:
    """The flags of the optimizer and of dtypes.

    Args:
        define: The definer of the program's flags.
        own: The default optimizer of the program, as text.
        has_own_policy: Whether models have their own dtype policy, which is the default.

    Attributes:
        every: All of the flags.
    """

    def __init__(self, define: FlagDefiner, own: str, *, has_own_policy: bool = False):
        self._values = define.values
        self._optimizer = define.enum(
            "optimizer",
            "own",
            ["own", *_OPTIMIZERS],
            f"Optimizer; own: {own}",
        )
        self._momentum = define.float(
            "momentum",
            0.0,
            "Momentum of sgd",
            lower_bound=0.0,
            upper_bound=0.999999,
        )
        self._decay = define.float(
            "weight_decay",
            None,
            "Decoupled weight decay; 0: none [gpt: 0.1]",
            lower_bound=0.0,
            upper_bound=100.0,
        )
        self._clip = define.float(
            "clip_norm",
            None,
            "Norm that gradients are clipped to; 0: none [gpt: 1]",
            lower_bound=0.0,
            upper_bound=1e9,
        )
        self._ema = define.float(
            "ema",
            None,
            "Momentum of a moving average of weights, which replaces them at the end",
            lower_bound=0.0,
            upper_bound=0.999999,
        )
        self._accumulate = define.integer(
            "accumulate",
            1,
            "Steps whose gradients are accumulated per update",
            lower_bound=1,
            upper_bound=1 << 20,
        )
        policies, words = list(_POLICIES), "Dtype policy of the model"
        if has_own_policy:
            policies, words = ["own", *policies], f"{words}; own: the preset's"
        self._policy = define.enum("dtype_policy", policies[0], policies, words)
        self._loss_scale = define.string(
            "loss_scale", "auto", "A number, none, or auto: dynamic with (mixed_)float16"
        )
        self.every: Sequence[flags.FlagHolder] = (
            self._optimizer,
            self._momentum,
            self._decay,
            self._clip,
            self._ema,
            self._accumulate,
            self._policy,
            self._loss_scale,
        )

    @property
    def averages(self) -> bool:
        """Whether a moving average replaces the weights at the end of training."""
        return self._ema.value is not None

    def check(self, *, is_tpu: bool, has_sync: bool) -> None:
        """Check the flags before the rendezvous of the ranks.

        Args:
            is_tpu: Whether a TPU is requested.
            has_sync: Whether ranks train with local steps (`--sync_every`).

        Raises:
            UsageError: Flags are incompatible.
        """
        self._fixed_scale()
        if self._optimizer.value != "sgd":
            given = f"--optimizer={self._optimizer.value}"
            refuse_ignored(self._values, (self._momentum,), "requires --optimizer=sgd", given)
        if is_tpu:
            of_dtypes = (self._policy, self._loss_scale)
            why = "is not supported on a TPU, which computes in mixed_bfloat16"
            refuse_ignored(self._values, of_dtypes, why, "with a TPU")
        if has_sync and self.averages:
            raise UsageError(
                "--ema is not supported with --sync_every, because weights differ between ranks. "
                f"Received: {as_given(self._values, [self._ema])} with --sync_every."
            )
        if has_sync and self._fixed_scale() is not None:
            raise UsageError(
                "--sync_every requires a dynamic loss scale or none. Received: "
                f"{as_given(self._values, [self._loss_scale])} with --sync_every."
            )

    def _fixed_scale(self) -> float | None:
        """The number of --loss_scale; None for auto and none."""
        text = self._loss_scale.value
        if text in ("auto", "none"):
            return None
        try:
            scale = float(text)
        except ValueError:
            scale = math.nan
        if not 0 < scale <= _LARGEST_SCALE:  # False for NaN too.
            meaning = f"auto, none, or a number above 0 and at most {_LARGEST_SCALE:g}"
            raise refuse(self._loss_scale.name, text, meaning)
        return scale

    @property
    def accumulation(self) -> int:
        """Steps whose gradients are accumulated per update."""
        return self._accumulate.value

    @property
    def policy(self) -> str | None:
        """The dtype policy; None for that of the model."""
        return None if self._policy.value == "own" else self._policy.value

    def set_policy(self) -> None:
        """Set the dtype policy of layers created afterwards."""
        import keras

        keras.config.set_dtype_policy(self._policy.value)

    def planned(self, own: str) -> dict[str, Any]:
        """The arguments of `tfdist.addons.planner.Limits` for these flags.

        Args:
            own: The class name of the task's optimizer in `keras.optimizers`.
        """
        optimizer = _OPTIMIZERS.get(self._optimizer.value, own).lower()
        return {
            "optimizer": "momentum" if optimizer == "sgd" and self._momentum.value else optimizer,
            "ema": self.averages,
            "dtype": self._policy.value,
            "accumulation": self._accumulate.value,
        }

    def make(self, own: str, rate: Any, *, undecayed: Sequence[str] = (), **arguments: Any) -> Any:
        """Create the optimizer of a task, with the changes of the flags.

        Args:
            own: The class name of the task's optimizer in `keras.optimizers`.
            rate: The learning rate, or a schedule.
            undecayed: Suffixes of the names of variables without weight decay.
            **arguments: The task's arguments of the optimizer.
        """
        import keras

        name = _OPTIMIZERS.get(self._optimizer.value, own)
        if name != own:
            # Only arguments that all optimizers support are kept, unlike the betas of Adam.
            shared = ("weight_decay", "global_clipnorm")
            arguments = {key: arguments[key] for key in shared if key in arguments}
        for flag, argument in ((self._decay, "weight_decay"), (self._clip, "global_clipnorm")):
            if flag.value is not None:
                arguments[argument] = flag.value or None
        if self._momentum.value:
            arguments["momentum"] = self._momentum.value
        if self._ema.value is not None:
            arguments |= {"use_ema": True, "ema_momentum": self._ema.value}
        if self._accumulate.value > 1:
            arguments["gradient_accumulation_steps"] = self._accumulate.value
        scale = self._fixed_scale()
        if scale is not None:
            arguments["loss_scale_factor"] = scale
        optimizer = getattr(keras.optimizers, name)(rate, **arguments)
        if undecayed and optimizer.weight_decay:
            optimizer.exclude_from_weight_decay(var_names=list(undecayed))
        return optimizer

    def scaled(self, optimizer: Any) -> Any:
        """Add loss scaling to an optimizer under float16; `compile` adds it under mixed_float16."""
        import keras

        if self._policy.value == "float16" and self._loss_scale.value == "auto":
            return keras.optimizers.LossScaleOptimizer(optimizer)
        return optimizer

    @property
    def compile_options(self) -> dict[str, Any]:
        """Further arguments of `compile`: whether it scales the loss automatically."""
        return {"auto_scale_loss": self._loss_scale.value == "auto"}

    @contextlib.contextmanager
    def expected_errors(self) -> Iterator[None]:
        """Convert errors of a strategy or an optimizer about these flags into a `UsageError`."""
        try:
            yield
        except (ValueError, NotImplementedError) as error:
            given = as_given(self._values, self.every)
            if not given:
                raise
            raise UsageError(f"{given} is not supported: {error}") from error


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
