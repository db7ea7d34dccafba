"""Kubernetes objects as YAML that all parsers read identically."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

#: Texts that are strings in all versions of YAML. Others are quoted: PyYAML does not quote `1e3`, which
#: Kubernetes' parser reads as a number.
_PLAIN = re.compile(r"(-{0,2}[A-Za-z]|/)[A-Za-z0-9/._=-]*(:[A-Za-z0-9/._=-]+)*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes ambiguous strings, and repeats shared parts instead of using aliases."""

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
    """Format objects as one stream of documents, after a comment."""
    documents = yaml.dump_all(
        objects,
        Dumper=_Dumper,
        sort_keys=False,
        explicit_start=True,
        width=float("inf"),
        allow_unicode=True,
    )
    return f"# {comment}\n{documents}"
