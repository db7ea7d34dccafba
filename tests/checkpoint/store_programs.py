"""What processes do with an object store: `store_programs.py WHAT ADDRESS`."""

from __future__ import annotations

import sys

from tfdist import checkpoint
from tfdist.checkpoint.directory_lock import DirectoryLock, check_lock
from tfdist.checkpoint.errors import DirectoryInUseError


def hold(address: str) -> None:
    """Holds the lock until its input ends."""
    lock = DirectoryLock(address)
    lock.acquire()
    print("held", flush=True)
    sys.stdin.read()
    check_lock(address)
    lock.release()
    print("released", flush=True)


def attempt(address: str) -> None:
    """Tells whether the lock is free."""
    lock = DirectoryLock(address)
    try:
        lock.acquire()
    except DirectoryInUseError as error:
        print(error)
    else:
        lock.release()
        print("free")


def save(address: str) -> None:
    """Saves steps 10 to 30, and restores the newest."""
    import keras

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(4)])
    for step in (10, 20, 30):
        model.set_weights([value * 0 + step for value in model.get_weights()])
        checkpoint.save(address, model, step=step)
    model.set_weights([value * 0 for value in model.get_weights()])
    print(checkpoint.latest(address))
    found = checkpoint.restore(address, model).step
    print(found, all((value == step).all() for value in model.get_weights()))


def latest(address: str) -> None:
    """Prints the newest checkpoint."""
    print(checkpoint.latest(address))


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
