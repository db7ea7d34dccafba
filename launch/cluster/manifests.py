"""Kubernetes objects as YAML that means the same to every parser."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

#: What no version of YAML takes for anything but a string. All else is put in quotes: PyYAML
#: leaves `1e3` as it is, and Kubernetes' parser reads a number.
_PLAIN = re.compile(r"(-{0,2}[A-Za-z]|/)[A-Za-z0-9/._=-]*(:[A-Za-z0-9/._=-]+)*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


class _Dumper(yaml.SafeDumper):
    """Quotes what may be misread, and writes the same part twice instead of pointing at it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


def _represent_string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    style = None if plain else "'" if text.isascii() and text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_string)


def to_yaml(comment: str, objects: Sequence[dict[str, Any]]) -> str:
    """Writes objects as one stream of documents, behind a comment."""
    documents = yaml.dump_all(
        objects,
        Dumper=_Dumper,
        sort_keys=False,
        explicit_start=True,
        width=float("inf"),
        allow_unicode=True,
    )
    return f"# {comment}\n{documents}"
