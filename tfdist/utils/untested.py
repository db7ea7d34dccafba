"""What was never run on its device: said once, in one line, where it is used."""

from __future__ import annotations

from absl import logging

_said: set[str] = set()


def say_untested(what: str) -> None:
    """Says that something was never run on its device.

    Args:
        what: Its name, and why it is there: "NCCL (communication='nccl')".
    """
    if what not in _said:
        _said.add(what)
        logging.warning(
            "tfdist: %s was never run on its device by tfdist's tests, which go up to that border.",
            what,
        )
