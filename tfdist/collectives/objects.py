"""Collectives of Python objects: small ones, between steps."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import tensorflow as tf

from tfdist.collectives.arguments import check_group, checked_member
from tfdist.collectives.group import Group
from tfdist.collectives.operations import all_gather, broadcast
from tfdist.utils import checks


def broadcast_object(value: Any, group: Group, root: int = 0, *, name: str = "object"):
    """Returns the root's `value` on every member. Eager only.

    Args:
        value: Any picklable object; members other than the root may pass None.
        group: The group.
        root: The root's place in the group.
        name: What the object is, for messages.

    Raises:
        ValueError: `root` is not in the group.
    """
    check_group(group, checks.text("name", name))
    root = checked_member(root, group, "root")
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
        value: Any picklable object.
        group: The group.
        name: What the object is, for messages.
    """
    check_group(group, checks.text("name", name))
    if group.size == 1:
        return [value]
    payload = np.frombuffer(cloudpickle.dumps(value), np.uint8)
    sizes = all_gather(tf.constant([len(payload)], tf.int64), group, name=f"{name}/size").numpy()
    content = all_gather(tf.constant(payload), group, uneven=True, name=name).numpy()
    parts = np.split(content, np.cumsum(sizes)[:-1])
    return [cloudpickle.loads(part.tobytes()) for part in parts]
