"""The likely mistake in a program whose ranks wait for others that do not come."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.watchdog.report import format_ranks

#: The purpose of the first collective of `fit`, `evaluate` and `predict`. The three share one name, so
#: that ranks which call different methods synchronize, too.
ARGUMENTS = "fit/arguments"
#: The purpose of the collectives that gather a model's shards to be written.
SAVED = "saved"
#: Those, and the barriers after the chief has written, which have the names of methods.
_SAVING = {SAVED, "save", "save_weights", "export"}


def likely_cause(collective: str, there: Sequence[int], missing: Sequence[int]) -> str:
    """The likely cause of a verdict, as a sentence that ends with a space; "" if there is none.

    Args:
        collective: The name of a collective.
        there: The ranks that wait in it.
        missing: The ranks that do not.
    """
    if f"/{ARGUMENTS}" in collective:
        did = "called `fit` (or `evaluate`, `predict`)"
    elif not _SAVING.isdisjoint(collective.split("/")):
        did = "called `save` (or `save_weights`, `export`)"
    else:
        return ""
    if not there or not missing:
        return ""
    return (
        f"{format_ranks(there).capitalize()} {did}, {format_ranks(missing)} did not: all ranks must call "
        "it, also where `strategy.is_chief` is False. "
    )
