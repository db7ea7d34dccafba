"""Build of the compiled libraries, with a cache."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tfdist.launch.flags.quiet import quiet_start
from tfdist.launch.install_horovod.prerequisites import find_compiler, with_scripts
from tfdist.runtime.digests import matches_digest, write_digest
from tfdist.utils.lazy import find_addon


def install_native(cache_dir: Path, *, force: bool = False) -> str:
    """Install the libraries into the package, from the cache or by building them.

    They are optional, so failures are not errors.

    Returns:
        A line of text for each library that describes the result.
    """
    with quiet_start():
        from tfdist.backend.native import TRANSPORT

        kernels = find_addon("cpu_kernels")
    libraries = [TRANSPORT, *([] if kernels is None else [kernels.LIBRARY])]
    # Each library is compiled by a separate process.
    with ThreadPoolExecutor() as pool:
        return "\n".join(pool.map(lambda each: _install(each, cache_dir, force), libraries))


def _install(library, cache_dir: Path, force: bool) -> str:
    path = library.path()
    kept = cache_dir.expanduser().absolute() / path.name
    try:
        if force:
            path.unlink(missing_ok=True)
        elif path.exists() and matches_digest(path):
            return f"The compiled library ({library.what}) was built before: {path}"
        elif kept.exists() and matches_digest(kept):
            # Atomically, so that other processes never find a partial library.
            copied = path.with_name(f"{path.name}.{os.getpid()}")
            shutil.copyfile(kept, copied)
            os.replace(copied, path)
            write_digest(path)
            return f"Copied the compiled library ({library.what}) from {kept}"
        compiler = find_compiler(with_scripts(os.environ))
        if not compiler:
            return _without("No C++ compiler was found.", library.what)
        start = time.monotonic()
        library.build(compiler)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, kept)
        write_digest(kept)
    except (OSError, RuntimeError) as error:
        return _without(str(error), library.what)
    return (
        f"Built the compiled library ({library.what}) in {time.monotonic() - start:.0f} s: {path}"
    )


def _without(why: str, what: str) -> str:
    return (
        f"{why} Without the compiled library ({what}), the slower engine and TensorFlow are used."
    )
