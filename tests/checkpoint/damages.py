"""Ways in which a checkpoint is damaged, by accident or on purpose.

Each is a function of a random generator, the newest checkpoint's folder and that of the one before.
Those of `BOUND` put right bytes in a wrong place, which only a manifest with digests tells; those of
`RECORDED` leave nothing that could be looked at, and are told by the record of the newest.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

__all__ = [
    "BOUND",
    "DAMAGES",
    "RECORDED",
    "Damage",
    "bound",
    "damage",
    "descriptions",
    "files",
    "recorded",
    "replaced",
]

Damage = Callable[[random.Random, Path, Path], None]
DAMAGES: dict[str, Damage] = {}
BOUND: set[str] = set()
RECORDED: set[str] = set()


def damage(function: Damage) -> Damage:
    DAMAGES[function.__name__] = function
    return function


def bound(function: Damage) -> Damage:
    BOUND.add(function.__name__)
    return damage(function)


def recorded(function: Damage) -> Damage:
    RECORDED.add(function.__name__)
    return damage(function)


# -- what is chosen ------------------------------------------------------------------------------


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def chunks(folder: Path) -> list[Path]:
    return [path for path in files(folder / "arrays") if path.name != "zarr.json"]


def descriptions(folder: Path) -> list[Path]:
    return sorted((folder / "arrays").rglob("zarr.json"))


def arrays(folder: Path) -> list[Path]:
    return [path.parent for path in descriptions(folder)]


def equal_pair(chance: random.Random, folder: Path) -> tuple[Path, Path]:
    """Two chunks of one length and of other content."""
    by_content: dict[int, dict[bytes, Path]] = {}
    for path in chunks(folder):
        content = path.read_bytes()
        by_content.setdefault(len(content), {})[content] = path
    pairs = [list(some.values()) for some in by_content.values() if len(some) > 1]
    first, second = chance.sample(chance.choice(pairs), 2)
    return first, second


def replaced(path: Path) -> Path:
    """The path, at which nothing is any more."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    return path


# -- content -------------------------------------------------------------------------------------


@damage
def flip_bit(chance, new, old):
    path = chance.choice(files(new))
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


@damage
def random_bytes(chance, new, old):
    path = chance.choice(files(new))
    content = bytearray(path.read_bytes())
    begin = chance.randrange(len(content))
    content[begin : begin + 16] = chance.randbytes(len(content[begin : begin + 16]))
    path.write_bytes(content)


@damage
def truncated(chance, new, old):
    path = chance.choice(files(new))
    os.truncate(path, chance.randrange(path.stat().st_size))


@damage
def emptied(chance, new, old):
    os.truncate(chance.choice(files(new)), 0)


@damage
def extended(chance, new, old):
    with open(chance.choice(files(new)), "ab") as file:
        file.write(chance.choice([b"\n", b"\0", b" ", chance.randbytes(chance.randrange(1, 5000))]))


@damage
def grown_without_end(chance, new, old):
    os.truncate(chance.choice(files(new)), 1 << chance.choice([31, 36, 40]))


@damage
def zeros(chance, new, old):
    path = chance.choice(chunks(new))
    path.write_bytes(bytes(path.stat().st_size))


@damage
def two_lines_swapped(chance, new, old):
    path = chance.choice([new / "manifest.json", *descriptions(new)])
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[middle:] + content[:middle])


# -- lost, renamed, in another place -------------------------------------------------------------


@damage
def file_lost(chance, new, old):
    chance.choice(files(new)).unlink()


@damage
def array_lost(chance, new, old):
    shutil.rmtree(chance.choice(arrays(new)))


@damage
def all_arrays_lost(chance, new, old):
    shutil.rmtree(new / "arrays")


@damage
def chunk_renamed(chance, new, old):
    path = chance.choice(chunks(new))
    pattern = chance.choice(
        [".{}.aB3xYz", "{}.bak", "{}~", "{}.part", ".nfs000001234", "{} ", "0{}"]
    )
    path.rename(path.with_name(pattern.format(path.name)))


@damage
def case_changed(chance, new, old):
    path = chance.choice([*files(new), *arrays(new)])
    path.rename(
        path.with_name(
            path.name.swapcase() + ("" if path.name.lower() != path.name.upper() else "x")
        )
    )


@damage
def array_renamed(chance, new, old):
    path = chance.choice(arrays(new))
    path.rename(path.with_name(path.name + chance.choice(["_1", ".bak", "~"])))


@bound
def chunks_swapped(chance, new, old):
    first, second = equal_pair(chance, new)
    ours, theirs = first.read_bytes(), second.read_bytes()
    first.write_bytes(theirs)
    second.write_bytes(ours)


@bound
def chunk_copied(chance, new, old):
    first, second = equal_pair(chance, new)
    shutil.copyfile(first, second)


@bound
def chunk_of_another_step(chance, new, old):
    path = chance.choice(chunks(new))
    shutil.copyfile(old / path.relative_to(new), path)


@bound
def array_of_another_step(chance, new, old):
    path = replaced(chance.choice(arrays(new)))
    shutil.copytree(old / path.relative_to(new), path)


@bound
def all_arrays_of_another_step(chance, new, old):
    shutil.copytree(old / "arrays", replaced(new / "arrays"))


@bound
def arrays_swapped(chance, new, old):
    first, second = (path.parent for path in chance.sample(descriptions(new), 2))
    aside = new / "aside"
    first.rename(aside)
    if second.exists():
        second.rename(first)
        aside.rename(second)


@bound
def array_copied(chance, new, old):
    first, second = chance.sample(arrays(new), 2)
    content = {path.relative_to(first): path.read_bytes() for path in files(first)}
    replaced(second)
    for path, each in content.items():
        (second / path).parent.mkdir(parents=True, exist_ok=True)
        (second / path).write_bytes(each)


@damage
def manifest_of_another_step(chance, new, old):
    shutil.copyfile(old / "manifest.json", new / "manifest.json")


# -- no file any more ----------------------------------------------------------------------------


@damage
def file_is_a_folder(chance, new, old):
    path = replaced(chance.choice(files(new)))
    path.mkdir()
    if chance.random() < 0.5:
        (path / "0").write_bytes(b"0")


@damage
def folder_is_a_file(chance, new, old):
    path = replaced(chance.choice([each / "c" for each in arrays(new)] + arrays(new)))
    path.write_bytes(chance.randbytes(10))


@damage
def file_is_a_link(chance, new, old):
    path = chance.choice(files(new))
    goals = [new / "nowhere", path, old / path.relative_to(new), Path("/dev/zero"), Path("/"), new]
    goal = chance.choice(goals)
    replaced(path).symlink_to(goal)


@damage
def file_is_a_link_to_itself_elsewhere(chance, new, old):
    path = chance.choice(files(new))
    goal = new.parent / "elsewhere"
    path.rename(goal)
    path.symlink_to(goal)


@damage
def folder_is_a_link(chance, new, old):
    path = chance.choice([*arrays(new), new / "arrays"])
    goal = chance.choice([old / path.relative_to(new), new, Path("/"), new / "nowhere"])
    replaced(path).symlink_to(goal)


@damage
def file_is_a_pipe(chance, new, old):
    os.mkfifo(replaced(chance.choice(files(new))))


@damage
def file_is_a_socket(chance, new, old):
    path = replaced(chance.choice(files(new)))
    here = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(f"/proc/self/fd/{here}/{path.name}")  # A socket's path is short.
    finally:
        os.close(here)


@damage
def file_is_a_device(chance, new, old):
    path = replaced(chance.choice(files(new)))
    with contextlib.suppress(PermissionError):
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, chance.choice([3, 5])))


@bound
def hard_link_to_another(chance, new, old):
    first, second = equal_pair(chance, new)
    replaced(second).hardlink_to(first)


@bound
def hard_link_to_another_step(chance, new, old):
    path = replaced(chance.choice(chunks(new)))
    path.hardlink_to(old / path.relative_to(new))


@damage
def not_readable(chance, new, old):
    chance.choice([*files(new), *arrays(new)]).chmod(0)
