"""The sizes of a transformer by the name of a known model, or from a configuration file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.launch.flags.values import UsageError, input_file, refuse
from tfdist.utils.checks import one_line

if TYPE_CHECKING:
    from tfdist.addons.planner import Transformer

#: The number of tokens from which on the layers of tfdist use blockwise attention.
LONG = 1024

_CONFIG = "config.json"


def file_or_name(flag: str, value: str, names: Any) -> Path | None:
    """The file that a flag names, or None if the value is one of `names`."""
    if value in names:
        return None
    path = Path(os.path.expanduser(value))
    try:
        path = path / _CONFIG if path.is_dir() else path
    except (OSError, ValueError) as error:
        raise refuse(flag, value, f"a file, or one of {', '.join(names)}") from error
    if os.sep not in value and not path.exists():
        raise refuse(flag, value, f"a file, or one of {', '.join(names)}")
    input_file(flag, str(path))
    return path


def sizes_of(flag: str, value: str, length: int | None) -> Transformer:
    """The model that a flag names: a known one, a config.json, or a folder with one.

    Args:
        flag: Name of the flag.
        value: Value of the flag.
        length: Tokens of a sample; None for the model's default.

    Raises:
        UsageError: The value is invalid, or a file is not a configuration.
    """
    from tfdist.addons.planner import Transformer, from_config
    from tfdist.addons.planner.configs import KNOWN

    path = file_or_name(flag, value, KNOWN)
    try:
        if path is not None:
            return from_config(json.loads(path.read_text(encoding="utf-8")), length=length)
        known = dict(KNOWN[value])
        return Transformer(**known if length is None else {**known, "length": length})
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"--{flag}={value} cannot be used: {one_line(error)}") from None


def is_preset(value: str) -> bool:
    """Whether a folder is a preset of KerasHub with a tokenizer, as tfdist-finetune requires."""
    folder = Path(os.path.expanduser(value))
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        return "registered_name" in config and (folder / "tokenizer.json").is_file()
    except (OSError, ValueError, TypeError, RecursionError):
        return False
