"""`--compression`: the compressor of gradients, such as `powersgd:4`."""

from __future__ import annotations

import math
from typing import Any

from tfdist.launch.flags.values import refuse

#: By name, the class of `tfdist.addons.slow_links`, and the name and type of the optional argument after a
#: colon.
_KINDS: dict[str, tuple[str, tuple[str, type] | None]] = {
    "powersgd": ("PowerSGD", ("rank", int)),
    "topk": ("TopK", ("ratio", float)),
    "onebit": ("OneBit", None),
    "int8": ("Int8", None),
    "int4": ("Int4", None),
}
_MEANING = "none, powersgd[:RANK], topk[:RATIO], onebit, int8 or int4"
_MOST = 1 << 16


def check_compression(flag: str, value: str) -> None:
    """Reject unknown compressors and invalid arguments, without importing the compressors."""
    if value == "none":
        return
    name, colon, given = value.partition(":")
    expected = _KINDS[name][1] if name in _KINDS else None
    if name not in _KINDS or (colon and expected is None):
        raise refuse(flag, value, _MEANING)
    if colon and expected is not None:
        argument, kind = expected
        try:
            number = kind(given)
        except ValueError:
            raise refuse(flag, value, _MEANING) from None
        if not math.isfinite(number) or not 0 < number <= (_MOST if kind is int else 1):
            most = f"from 1 to {_MOST:,}" if kind is int else "above 0 and at most 1"
            raise refuse(flag, value, f"{_MEANING}, with a {argument} {most}")


def make_compressor(value: str, **options: Any) -> Any:
    """Create the compressor of a checked value with further arguments; None for "none"."""
    if value == "none":
        return None
    from tfdist.addons import slow_links

    name, colon, given = value.partition(":")
    kind, argument = _KINDS[name]
    arguments = {argument[0]: argument[1](given)} if colon and argument is not None else {}
    return getattr(slow_links, kind)(**arguments, **options)
