"""Strategies of other packages, which `auto` asks first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.utils import checks


@dataclasses.dataclass(frozen=True)
class Registered:
    """A kind of strategy.

    Attributes:
        name: What it is called in messages.
        detect: Whether this process was started for it.
        make: Makes it; called with the mesh and the options that `auto` was given.
    """

    name: str
    detect: Callable[[], bool]
    make: Callable[..., Any]


_registered: dict[str, Registered] = {}


def register_strategy(
    name: str, detect: Callable[[], bool], make: Callable[..., tf.distribute.Strategy]
) -> None:
    """Has `tfdist.strategies.auto` return a strategy where it detects that it is wanted.

    `auto` asks in the order of registration, and before it looks for launchers of its own. A name that
    is registered again replaces the strategy of that name.

    Args:
        name: What the strategy is called in messages.
        detect: Whether this process was started for it, as an environment variable may say.
        make: Called as `make(mesh, **options)` with what `auto` was given; returns the strategy.

    Raises:
        TypeError: An argument has another type.
    """
    checks.text("name", name)
    checks.function("detect", detect)
    checks.function("make", make)
    _registered[name] = Registered(name, detect, make)


def registered() -> list[Registered]:
    """All that are registered, in order."""
    return list(_registered.values())
