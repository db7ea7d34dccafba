"""Strategies of other packages, which `auto` tries first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.utils import checks


@dataclasses.dataclass(frozen=True)
class Registered:
    """A registered strategy.

    Attributes:
        name: Its name in messages.
        detect: Returns whether this process was started for it.
        make: Creates it from the mesh and the options of `auto`.
    """

    name: str
    detect: Callable[[], bool]
    make: Callable[..., Any]


_registered: dict[str, Registered] = {}


def register_strategy(
    name: str, detect: Callable[[], bool], make: Callable[..., tf.distribute.Strategy]
) -> None:
    """Registers a strategy that `tfdist.strategies.auto` returns if the launch is for it.

    `auto` tries registered strategies in the order of registration, before the built-in ones. Registering a
    name again replaces the strategy of that name.

    Args:
        name: The name of the strategy in messages.
        detect: Returns whether this process was started for it, for example from an environment variable.
        make: Called as `make(mesh, **options)` with the arguments of `auto`; returns the strategy.

    Raises:
        TypeError: An argument has another type.
    """
    checks.text("name", name)
    checks.function("detect", detect)
    checks.function("make", make)
    _registered[name] = Registered(name, detect, make)


def registered() -> list[Registered]:
    """The registered strategies, in order."""
    return list(_registered.values())
