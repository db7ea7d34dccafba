"""The table of the document, from the lines of all parts."""

from __future__ import annotations

from collections.abc import Mapping

from tabulate import tabulate

from benchmarks.gpu.parts import PARTS


def table(found: Mapping[str, Mapping]) -> str:
    """A Markdown table with a row for each part that was run.

    Args:
        found: The lines, by part.
    """
    card = (found.get("libraries", {}).get("result") or {}).get("gpu", "an unknown device")
    rows = [
        (part.name, part.asks, _answer(found[part.name])) for part in PARTS if part.name in found
    ]
    body = tabulate(rows, ("part", "question", "answer"), tablefmt="github", disable_numparse=True)
    return f"Measured on {card}.\n\n{body}\n"


def _answer(line: Mapping) -> str:
    result = line.get("result")
    if result is None:
        how = f"no answer within {line['timed_out']:.0f} s" if "timed_out" in line else "failed"
        last = str(line.get("said", "")).strip().splitlines()[-1:]
        return f"{how}: {last[0][:120] if last else 'it said nothing'}".replace("|", "/")
    return ", ".join(f"{name} {_shown(value)}" for name, value in result.items()).replace("|", "/")


def _shown(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name} {_shown(each)}" for name, each in value.items()) + ")"
    return str(value)
