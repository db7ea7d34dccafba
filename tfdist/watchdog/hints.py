"""What a user most likely did, where ranks wait for others that do not come."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.watchdog.report import rank_words

#: What the collective serves that `fit`, `evaluate` and `predict` begin with: one name for the three,
#: so that ranks which call another of them meet, too.
ARGUMENTS = "fit/arguments"
#: What the collectives serve that gather a model's shards to be written.
SAVED = "saved"
#: Those, and the barriers after the chief has written, which bear the names of methods.
_SAVING = {SAVED, "save", "save_weights", "export"}


def likely_cause(collective: str, there: Sequence[int], missing: Sequence[int]) -> str:
    """The cause that a verdict names first; "" where none is likelier than others.

    `there` are the ranks that wait in the collective, `missing` those that do not. A blank ends the
    sentence.
    """
    if not there or not missing:
        return ""
    if f"/{ARGUMENTS}" in collective:
        did = "called `fit` (or `evaluate`, `predict`)"
    elif not _SAVING.isdisjoint(collective.split("/")):
        did = "called `save` (or `save_weights`, `export`)"
    else:
        return ""
    return (
        f"{rank_words(there).capitalize()} {did}, {rank_words(missing)} did not: all ranks call it, "
        "also where `strategy.is_chief` is False. "
    )
