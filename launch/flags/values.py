"""Checks of flags by their type, and of flags that name files and folders.

absl accepts any text, and NaN despite bounds. Each check raises a `UsageError` of one line that names
the flag and shows the value.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Sequence
from typing import Any

from absl import flags

from tfdist.runtime.directories import SCHEMES, checked_directory, is_address
from tfdist.utils.checks import LARGEST, shown
from tfdist.utils.errors import TfdistError

#: More than in any known job, and small enough to list the settings of each rank.
MOST_RANKS = 16_384
MOST_RANKS_OF_A_HOST = 1024
#: In seconds; the upper bound of flags that are times.
YEAR = 366 * 24 * 3600
_MOST_CHARACTERS = 100_000


class UsageError(TfdistError):
    """An invalid request of the user, with a one-line message and a remedy."""


def refuse(flag: str, value: Any, meaning: str) -> UsageError:
    """Create the error for an invalid value of a flag; `meaning` follows "must be"."""
    plain = isinstance(value, str) and value.strip() and value.isprintable()
    text = value if plain else shown(value)
    if len(text) > 200:
        text = f"{text[:200]}..."
    given = f"-{flag}" if len(flag) == 1 else f"--{flag}"
    return UsageError(f"{given} must be {meaning}. Received: {given}={text}.")


def check_values(values: flags.FlagValues) -> None:
    """Check the values of flags on the command line, by the type of the flag.

    Numbers must be finite and fit into 32 bits, unless the flag has an upper bound; texts must be
    non-empty UTF-8 without control characters; lists must not be empty.
    """
    for name in values:
        flag = values[name]
        if not flag.present or flag.value is None:
            continue
        if isinstance(flag.value, list | tuple):
            if not flag.value:
                raise refuse(name, "", "a list of at least one word")
            for entry in flag.value:
                _check_text(name, entry)
        elif isinstance(flag.value, str):
            _check_text(name, flag.value)
        elif isinstance(flag.value, float) and not math.isfinite(flag.value):
            raise refuse(name, flag.value, "a finite number")
        elif (
            isinstance(flag.value, int)
            and abs(flag.value) > LARGEST
            and getattr(flag.parser, "upper_bound", None) is None
        ):
            raise refuse(name, flag.value, f"a number of at most {LARGEST:,}")


def _check_text(name: str, text: str) -> None:
    if not text.strip():
        raise refuse(name, text, "a text that is not empty")
    if not text.isprintable():
        raise refuse(name, text, "a text in UTF-8 without control characters")
    if len(text) > _MOST_CHARACTERS:
        raise refuse(name, text, f"a text of at most {_MOST_CHARACTERS:,} characters")


def data_folder(flag: str, path: str) -> None:
    """Check the path of a folder of data sets, or an address that TensorFlow reads."""
    if not is_address(path):
        folder(flag, path)
    elif not path.startswith("gs://"):
        raise UsageError(
            f"--{flag} must be a folder, or an address gs://bucket/folder. Received: --{flag}={path}. Copy the "
            "data, or mount the bucket."
        )


def folder(flag: str, path: str) -> None:
    """Check the path of a folder that exists or can be created, other than the root."""
    found = os.path.abspath(os.path.expanduser(path))
    if not found.strip("/"):
        raise refuse(flag, path, "a folder other than the root of the file system")
    while (mode := _mode(flag, path, found)) is None and found != os.path.dirname(found):
        found = os.path.dirname(found)
    if mode != stat.S_IFDIR:
        raise UsageError(f"--{flag}={path} cannot be written: {found} is not a folder.")


def input_file(flag: str | None, path: str, prefix: str = "") -> None:
    """Check the path of a readable file; the flag's value may have a prefix before the path.

    Args:
        flag: The flag; None for a positional argument.
        path: The path.
        prefix: The text before the path.
    """
    given = path if flag is None else f"--{flag}={prefix}{path}"
    found = os.path.expanduser(path)
    mode = _mode(flag or "file", path, found)
    if mode is None:
        raise UsageError(f"{given} does not exist.")
    if mode != stat.S_IFREG:
        raise UsageError(f"{given} is not a file.")
    if not os.access(found, os.R_OK):
        raise UsageError(f"{given} cannot be read: permission denied.")


def data_file(flag: str, path: str, prefix: str = "") -> None:
    """Check the path of a readable file, or the address of one in an object store, which is not opened."""
    if not is_address(path):
        input_file(flag, path, prefix)
        return
    try:
        checked_directory(path, flag)
    except ValueError:
        schemes = " or ".join(f"{scheme}://bucket/name" for scheme in SCHEMES)
        raise UsageError(
            f"--{flag} must be {prefix}FILE, or an address: {prefix}{schemes}. Received: "
            f"--{flag}={prefix}{path}."
        ) from None


def output_file(flag: str, path: str, endings: Sequence[str] = ()) -> None:
    """Check the path of a writable file, and its suffix, without writing to it."""
    if endings and not path.endswith(tuple(endings)):
        raise refuse(flag, path, f"a file that ends in {' or '.join(endings)}")
    found = os.path.expanduser(path)
    parent = os.path.dirname(os.path.abspath(found))
    mode = _mode(flag, path, found)
    if mode == stat.S_IFDIR or path.endswith("/"):
        why = "it is a folder"
    elif mode is None and _mode(flag, path, parent) != stat.S_IFDIR:
        why = f"{parent} is not a folder"
    elif not os.access(parent if mode is None else found, os.W_OK):
        why = "permission denied"
    else:
        return
    raise UsageError(f"--{flag}={path} cannot be written: {why}.")


def _mode(flag: str, path: str, found: str) -> int | None:
    """The type of the file; None if it does not exist."""
    try:
        return stat.S_IFMT(os.stat(found).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise refuse(flag, path, f"a path: {words}") from error
