"""Some items of a list: which have the same key, and new values for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

_Key = TypeVar("_Key", bound=Hashable)


def places_by(keys: Iterable[_Key | None]) -> dict[_Key, list[int]]:
    """The places of each key in a sequence, in the order of the first ones; those of None are left out."""
    found: dict[_Key, list[int]] = {}
    for place, key in enumerate(keys):
        if key is not None:
            found.setdefault(key, []).append(place)
    return found


def replace_at(items: list, places: Iterable[int], values: Iterable) -> None:
    """Replaces the items at some places of a list, in place."""
    for place, value in zip(places, values, strict=True):
        items[place] = value


def replaced_by_key(
    items: Iterable, keys: Iterable[_Key | None], function: Callable[[_Key, list[int]], Iterable]
) -> list[Any]:
    """The items, where those with the same key are replaced by the results of one call.

    Args:
        items: The items.
        keys: The key of each item; None leaves the item as it is.
        function: Called with a key and its places; returns the new items of these places.
    """
    found = list(items)
    for key, places in places_by(keys).items():
        replace_at(found, places, function(key, places))
    return found
