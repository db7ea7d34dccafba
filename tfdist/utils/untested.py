"""A warning for features whose device the tests do not have, logged once each."""

from __future__ import annotations

import functools

from absl import logging


@functools.cache
def say_untested(what: str) -> None:
    """Warns once that a feature has never been run on its device.

    Args:
        what: The feature and what enables it: "NCCL (communication='nccl')".
    """
    logging.warning(
        "tfdist: %s has not been tested on its device; the tests only cover the code up to it.",
        what,
    )
