"""Build of the compiled libraries, with a cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tfdist.launch.flags.quiet import quiet_start
from tfdist.launch.install_horovod.digests import write_digest
from tfdist.launch.install_horovod.prerequisites import find_compiler, with_scripts
from tfdist.launch.sessions import run_in_session
from tfdist.runtime.digests import matches_digest
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
        _build(library, compiler)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, kept)
        write_digest(kept)
    except (OSError, RuntimeError) as error:
        return _without(str(error), library.what)
    return (
        f"Built the compiled library ({library.what}) in {time.monotonic() - start:.0f} s: {path}"
    )


def _build(library, compiler: Sequence[str]) -> None:
    """Compile a library next to its sources, in place of earlier ones.

    Args:
        library: The library.
        compiler: The command of a C++17 compiler.

    Raises:
        RuntimeError: The compiler failed; the message contains its output.
        OSError: The compiler was not found, or the package's folder is not writable.
    """
    import tensorflow as tf

    from tfdist.backend.native.library import FLAGS, HERE

    path = library.path()
    with tempfile.TemporaryDirectory(dir=library.folder, prefix="build-") as folder:
        made = Path(folder) / path.name
        flags = [*FLAGS, f"-I{HERE}", *tf.sysconfig.get_compile_flags()]
        files = [*map(str, library.sources), "-o", str(made), *tf.sysconfig.get_link_flags()]
        finished = run_in_session([*compiler, *flags, *files], stderr=subprocess.PIPE, text=True)
        if finished.returncode:
            raise RuntimeError(f"{finished.stderr[-4000:]}\n{compiler[0]} failed, see above.")
        for pattern in ("tfdist-*.so", "tfdist-*.so.sha256"):
            for old in library.folder.glob(pattern):
                old.unlink()
        # Atomically: another process finds the complete library or none.
        os.replace(made, path)
        write_digest(path)


def _without(why: str, what: str) -> str:
    return (
        f"{why} Without the compiled library ({what}), the slower engine and TensorFlow are used."
    )
