"""Builds the compiled library (`tfdist.backend.native`), and keeps it."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from tfdist.launch.horovod_prerequisites import find_compiler, with_scripts
from tfdist.launch.quiet import quiet_start
from tfdist.runtime.digests import matches_digest, write_digest

__all__ = ["install_native"]


def install_native(cache_dir: Path, *, force: bool = False) -> str:
    """Puts the library into the installed package, out of the cache or newly built.

    All works without it, if more slowly, so nothing here is an error: the line that is returned
    says what came of it.
    """
    with quiet_start():
        from tfdist.backend.native import build, library_path

    path = library_path()
    kept = cache_dir.expanduser().absolute() / path.name
    try:
        if force:
            path.unlink(missing_ok=True)
        elif path.exists() and matches_digest(path):
            return f"The compiled library was built before: {path}"
        elif kept.exists() and matches_digest(kept):
            # In one step: another process finds the whole library or none.
            copied = path.with_name(f"{path.name}.{os.getpid()}")
            shutil.copyfile(kept, copied)
            os.replace(copied, path)
            write_digest(path)
            return f"Took the compiled library from {kept}"
        compiler = find_compiler(with_scripts(os.environ))
        if not compiler:
            return _without("No C++ compiler was found.")
        start = time.monotonic()
        build(compiler)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, kept)
        write_digest(kept)
    except (OSError, RuntimeError) as error:
        return _without(str(error))
    return f"Built the compiled library in {time.monotonic() - start:.0f} s: {path}"


def _without(why: str) -> str:
    return f"{why} Without the compiled library, all goes through the engine and TensorFlow, more slowly."
