"""Python objects among ranks: small things that ranks agree on before and between steps."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import tensorflow as tf

from tfdist.collectives.group import Group
from tfdist.collectives.operations import all_gather, broadcast
from tfdist.utils import checks


def broadcast_object(value: Any, group: Group, root: int = 0, *, name: str = "object"):
    """Returns the root's `value` on every member. Eager only.

    Args:
        value: Anything that pickles; members other than the root may pass None.
        group: The group.
        root: The root's place in the group.
        name: What the object is, for messages.

    Raises:
        ValueError: `root` is not in the group.
    """
    checks.instance("group", group, Group, "a Group, as of `strategy.group()`")
    root = checks.integer("root", root, minimum=0, maximum=group.size - 1)
    checks.text("name", name)
    if group.size == 1:
        return value
    own = group.rank == root
    payload = np.frombuffer(cloudpickle.dumps(value) if own else b"", np.uint8)
    size = broadcast(tf.constant([len(payload)], tf.int64), group, root, name=f"{name}/size")
    if not own:
        payload = np.zeros(int(size[0]), np.uint8)
    content = broadcast(tf.constant(payload), group, root, name=name)
    return value if own else cloudpickle.loads(content.numpy().tobytes())


def all_gather_object(value: Any, group: Group, *, name: str = "object") -> list:
    """Returns every member's `value`, in group order, on every member. Eager only.

    Args:
        value: Anything that pickles.
        group: The group.
        name: What the object is, for messages.
    """
    checks.instance("group", group, Group, "a Group, as of `strategy.group()`")
    checks.text("name", name)
    if group.size == 1:
        return [value]
    payload = np.frombuffer(cloudpickle.dumps(value), np.uint8)
    sizes = all_gather(tf.constant([len(payload)], tf.int64), group, name=f"{name}/size").numpy()
    content = all_gather(tf.constant(payload), group, uneven=True, name=name).numpy()
    ends = np.cumsum(sizes)
    return [
        cloudpickle.loads(content[end - size : end].tobytes())
        for end, size in zip(ends, sizes, strict=True)
    ]
