"""A plan: the variables of a model that are split over the tensor axis, by patterns of their paths.

A plan maps regular expressions to words, as Keras' `LayoutMap` maps them to layouts. It is plain
data, and the same for any number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tfdist.sharding.split import registered_kinds
from tfdist.utils import checks

#: The words of a plan, in addition to the kinds of registered splits.
KINDS = ("column", "row", "vocabulary", "replicate")

#: For `keras_hub.models.GPT2Backbone`, and tasks built on it.
GPT2: Mapping[str, str] = {
    r".*token_embedding/embeddings": "vocabulary",
    r".*/self_attention/(query|key|value)/(kernel|bias)": "column",
    r".*/self_attention/attention_output/kernel": "row",
    r".*/feedforward_intermediate_dense/(kernel|bias)": "column",
    r".*/feedforward_output_dense/kernel": "row",
}

#: For `keras_hub.models.LlamaBackbone`, and those with the same names in blocks, as `Qwen3Backbone`.
LLAMA: Mapping[str, str] = {
    r".*token_embedding/(reverse_)?embeddings": "vocabulary",
    r".*/self_attention/(query|key|value)/kernel": "column",
    r".*/self_attention/attention_output/kernel": "row",
    r".*/feedforward_(intermediate|gate)_dense/kernel": "column",
    r".*/feedforward_output_dense/kernel": "row",
}


def check_plan(plan: Mapping[str, str]) -> None:
    """Checks that a plan maps strings to words of `KINDS`, or to kinds of registered splits.

    Raises:
        TypeError: It is not a mapping.
        ValueError: A key is not a string, or a word is unknown.
    """
    meaning = "a dict from patterns to words, or a LayoutMap of Keras"
    checks.instance("plan", plan, Mapping, meaning)
    known = dict.fromkeys([*KINDS, *registered_kinds()])
    for pattern, kind in plan.items():
        if not isinstance(pattern, str):
            raise checks.refuse("plan", plan, f"a dict from patterns, which {pattern!r} is not")
        if not isinstance(kind, str) or kind not in known:
            raise ValueError(
                f"The words of a `plan` must be {', '.join(repr(word) for word in known)}. Received: "
                f"{kind!r} for the pattern {pattern!r}, in {checks.shown(plan)}."
            )


def kinds_of(plan: Mapping[str, str], paths: Sequence[str]) -> dict[str, str]:
    """The word of a plan for each path that one of its patterns matches.

    Args:
        plan: A dict from patterns to words. A pattern matches a whole path (`re.fullmatch`).
        paths: The paths of a model's variables.

    Returns:
        The word for each path that is matched.

    Raises:
        ValueError: A word is unknown, a pattern is not a regular expression or matches nothing, or
            two match one path.
    """
    check_plan(plan)
    found: dict[str, tuple[str, str]] = {}
    for pattern, kind in plan.items():
        for path in paths_matched(pattern, paths):
            if path in found:
                raise ValueError(
                    "A variable must match at most one pattern of a plan. "
                    f"Received: {pattern!r} and {found[path][0]!r}, which both match {path!r}."
                )
            found[path] = (pattern, kind)
    return {path: kind for path, (_, kind) in found.items()}


def paths_matched(pattern: str, paths: Sequence[str]) -> list[str]:
    """The paths that a pattern matches as a whole.

    Raises:
        ValueError: There is none, or the pattern is not a regular expression.
    """
    matched = [path for path in dict.fromkeys(paths) if _matches(pattern, path)]
    if not matched:
        raise ValueError(_no_match(pattern, paths))
    return matched


def _matches(pattern: str, path: str) -> bool:
    try:
        return re.fullmatch(pattern, path) is not None
    except re.error as error:
        raise ValueError(
            f"The patterns of a plan must be regular expressions. Received: {pattern!r} ({error})."
        ) from error


def _no_match(pattern: str, paths: Sequence[str]) -> str:
    inside = [path for path in paths if re.search(pattern, path)]
    if inside:
        return (
            f"The pattern {pattern!r} does not match any variable: patterns match whole paths. It occurs "
            f"inside {inside[0]!r}, which '.*{pattern}.*' would match."
        )
    some = ", ".join(repr(path) for path in paths[:5])
    return (
        f"The pattern {pattern!r} does not match any variable. The first of the model's {len(paths)} "
        f"paths are {some}; `[v.path for v in model.weights]` lists them all."
    )
