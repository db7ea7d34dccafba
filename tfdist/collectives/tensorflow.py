"""TensorFlow's own collectives as an engine, without a C++ build: a ring over gRPC, and NCCL between GPUs."""

from __future__ import annotations

import zlib

import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.order import in_any_order
from tfdist.collectives.engine import Engine, reduce_locally, shape_of, split_rows
from tfdist.collectives.group import Group
from tfdist.collectives.tensorflow_cluster import bring_up_cluster
from tfdist.mesh import Mesh
from tfdist.runtime.schedulers import join, started_by_scheduler
from tfdist.runtime.tf_config import read_tf_config, started_by_tf_config
from tfdist.utils import checks
from tfdist.utils.untested import say_untested

#: TensorFlow's implementations of collectives.
COMMUNICATIONS = ("auto", "ring", "nccl")


class TensorFlowEngine(Engine):
    """TensorFlow's collective operations between the processes of TF_CONFIG.

    On CPU, TensorFlow has all-reduce, all-gather, broadcast and all-to-all; reduce-scatter is an
    exchange and a local reduction, which sends the same number of bytes as a ring.

    On ranks with GPUs, floating and complex tensors are reduced, gathered and exchanged by NCCL. Integers and
    bool, which TensorFlow does not reduce there, go over the host; so do broadcasts and messages: TensorFlow
    starts them in any order, while NCCL requires one order on all ranks.

    Args:
        mesh: The mesh, which is resolved for the cluster.
        communication: `tf.distribute.experimental.CommunicationImplementation` by name: "auto" (NCCL between
            GPUs, else a ring), "ring" or "nccl".
    """

    name = "tensorflow"
    reduce_as = dict.fromkeys((tf.uint8, tf.int8, tf.int16, tf.uint16), tf.int32)
    move_as = {
        **dict.fromkeys((tf.bool, tf.uint32, *reduce_as), tf.int32),
        tf.bfloat16: tf.float16,
        tf.uint64: tf.int64,
    }

    def __init__(self, mesh: Mesh | None = None, communication: str = "auto"):
        checks.instance("mesh", mesh, Mesh, "a tfdist.Mesh", optional=True)
        checks.one_of("communication", communication, COMMUNICATIONS)
        scheduled = started_by_scheduler()
        if scheduled and not started_by_tf_config():
            join("tensorflow", scheduled)
        rank, size = started_by_tf_config() or (0, 1)
        resolved = (mesh or Mesh()).resolve(size=size, rank=rank)
        self._hint = communication
        if devices.has_gpu():
            self._hint = "nccl" if communication == "auto" else communication
            self.reduce_as = {**self.reduce_as, tf.bfloat16: tf.float32}
        if size > 1:
            if self._hint == "nccl" and devices.has_gpu() and rank == 0:
                say_untested("NCCL (in TensorFlow's collectives)")
            bring_up_cluster(communication)
        super().__init__(resolved)

    def all_reduce(self, tensor, group, reduction, name):
        """`CollectiveReduceV2`."""
        merge = {"max": "Max", "min": "Min"}.get(reduction, "Add")
        final = "Div" if reduction == "mean" else "Id"
        tensor, restore = _never_empty(tensor)
        operation = tf.raw_ops.CollectiveReduceV2
        return restore(self._run(operation, tensor, group, name, merge_op=merge, final_op=final))

    def all_gather(self, tensor, group, name):
        """`CollectiveGatherV2`."""
        if tensor.shape.num_elements():
            return self._run(tf.raw_ops.CollectiveGatherV2, tensor, group, name)
        rows = tf.shape(tensor)[0]
        return _flatten_rows(self._gather_padded(tensor, rows, group, name)[:, :rows])

    def all_gather_uneven(self, tensor, group, name):
        """Pads to the longest, gathers, and removes the padding."""
        sizes = self.all_gather(tf.shape(tensor)[:1], group, f"{name}/sizes")
        sizes.set_shape([group.size])
        padded = self._gather_padded(tensor, tf.reduce_max(sizes), group, name)
        return _without_padding(padded, sizes)

    def reduce_scatter(self, tensor, group, reduction, name):
        """An exchange of shares, each reduced on its member; for sums by NCCL `CollectiveReduceScatterV2`."""
        if reduction in ("sum", "mean") and self._is_on_device(tensor.dtype):
            operation = tf.raw_ops.CollectiveReduceScatterV2
            share = self._run(operation, tensor, group, name, merge_op="Add", final_op="Id")
            return share / tf.cast(group.size, share.dtype) if reduction == "mean" else share
        received = self.all_to_all(tensor, group, name)
        received.set_shape(tensor.shape)
        return reduce_locally(split_rows(received, group.size), reduction)

    def all_to_all(self, tensor, group, name):
        """`CollectiveAllToAllV2`."""
        stacked = split_rows(tensor, group.size)
        if not stacked.shape.num_elements():
            # One more row for each member, since none may be empty.
            rows = tf.shape(stacked)[1]
            stacked = _padded(stacked, 1, dim=1)
            return _flatten_rows(self._exchange(stacked, group, name)[:, :rows])
        return _flatten_rows(self._exchange(stacked, group, name))

    def all_to_all_uneven(self, tensor, splits, group, name):
        """Pads every part to the longest of the group, exchanges, and removes the padding."""
        received = self._exchange(splits, group, f"{name}/splits")
        received.set_shape([group.size])
        longest = tf.reduce_max(splits, keepdims=True)
        longest = self.all_reduce(longest, group, "max", f"{name}/longest")[0]
        if 0 in tensor.shape[1:]:
            return tf.zeros([tf.reduce_sum(received), *tensor.shape[1:]], tensor.dtype), received
        rows = tf.maximum(longest, 1)
        parts = tf.split(tensor, splits, num=group.size, axis=0)
        stacked = tf.stack([_padded(part, rows - tf.shape(part)[0]) for part in parts])
        return _without_padding(self._exchange(stacked, group, name), received), received

    def broadcast(self, tensor, root, group, name):
        """`CollectiveBcastSendV2` and `CollectiveBcastRecvV2`."""
        tensor, restore = _never_empty(tensor)
        # TensorFlow stores which member of an instance was the sender.
        with devices.on_host():
            keyed = self._keyed(group, f"{name}/root{root}", tensor, on_device=False)
            del keyed["ordering_token"], keyed["is_stateless"]
            if group.rank == root:
                return restore(tf.raw_ops.CollectiveBcastSendV2(input=tensor, **keyed))
            shape = tf.shape(tensor)
            return restore(tf.raw_ops.CollectiveBcastRecvV2(T=tensor.dtype, shape=shape, **keyed))

    def uses_host(self, operation, dtype):
        """Also for broadcasts and messages, and without NCCL."""
        in_any_order = operation in ("broadcast", "send", "receive")
        return in_any_order or not self._is_on_device(dtype)

    def host_address(self):
        """This worker's host in TF_CONFIG."""
        config = read_tf_config()
        if config is None:
            raise RuntimeError("TF_CONFIG, with which this rank was started, is not set any more.")
        return config.workers[config.index].rsplit(":", 1)[0]

    def _gather_padded(self, tensor, rows, group: Group, name: str) -> tf.Tensor:
        """All members' tensors, padded to `rows` rows and at least one: [size, rows, ...]."""
        if 0 in tensor.shape[1:]:
            return tf.zeros([group.size, rows, *tensor.shape[1:]], tensor.dtype)
        padded = _padded(tensor, tf.maximum(rows, 1) - tf.shape(tensor)[0])
        gathered = self._run(tf.raw_ops.CollectiveGatherV2, padded, group, name)
        return split_rows(gathered, group.size)

    def _exchange(self, stacked, group: Group, name: str) -> tf.Tensor:
        """Sends slice i of dim 0 to member i."""
        received = self._run(tf.raw_ops.CollectiveAllToAllV2, stacked, group, name)
        return tf.ensure_shape(received, stacked.shape)

    def _is_on_device(self, dtype: tf.DType) -> bool:
        """Whether tensors of a dtype are in the memory of a GPU, between which NCCL sends them."""
        return self._hint == "nccl" and devices.has_gpu() and not devices.stays_on_host(dtype)

    def _run(self, operation, tensor: tf.Tensor, group: Group, name: str, **options) -> tf.Tensor:
        on_device = self._is_on_device(tensor.dtype)
        with devices.placed(not on_device):
            keyed = self._keyed(group, name, tensor, on_device)
            result = operation(input=tensor, **options, **keyed)
        if devices.has_gpu() and not on_device and not tf.executing_eagerly():
            # NCCL requires one order; on the host an operation would wait for those before it on the GPU.
            in_any_order(result.op)
        return result

    def _keyed(self, group: Group, name: str, tensor: tf.Tensor, on_device: bool) -> dict:
        if not tf.executing_eagerly() and not tf.inside_function():
            # A session only has the devices of its process: the group would never be complete.
            raise NotImplementedError(
                "TensorFlow's collectives are not supported in a `tf.compat.v1.Session`. Received: the "
                f"operation {name!r} in a `tf.Graph`. Build it in a `tf.function`, or use "
                "HorovodStrategy, whose operations run in sessions."
            )
        # TensorFlow identifies an instance by its key, whose dtype and shape are those of the first
        # run. The key is computed from the name, so that it is the same when a function is traced
        # again, and from the sizes, of which a rank may know at run time what another one knows before.
        sizes = [size * _number(f"dim {dim}") for dim, size in enumerate(shape_of(tensor))]
        known = sum(size for size in sizes if isinstance(size, int))
        instance = (_number(f"{name}:{tensor.dtype.name}") + known) & checks.LARGEST
        if not tensor.shape.is_fully_defined():
            rest = tf.add_n([size for size in sizes if not isinstance(size, int)])
            instance = tf.bitwise.bitwise_and(instance + rest, tf.constant(checks.LARGEST))
        return {
            "group_size": group.size,
            # TensorFlow refuses a group of devices of two types.
            "group_key": _number(f"{'device ' if on_device else ''}group {group.ranks}"),
            "instance_key": instance,
            "ordering_token": [],
            "communication_hint": self._hint if on_device or not devices.has_gpu() else "ring",
            "timeout_seconds": 0.0,
            "is_stateless": False,
        }


def _number(text: str) -> int:
    """A positive int32 that is the same for the same text on all ranks."""
    return zlib.crc32(text.encode()) & checks.LARGEST


def _never_empty(tensor: tf.Tensor):
    """Returns a vector that has at least one element, and a function that restores results.

    TensorFlow's ring crashes the process on tensors without elements.
    """
    if tensor.shape.num_elements():
        return tensor, lambda result: result
    size = tf.size(tensor, tf.int64)
    return _padded(tensor, tf.cast(size == 0, tf.int32)), lambda result: result[:size]


def _padded(tensor: tf.Tensor, count, dim: int = 0) -> tf.Tensor:
    """Appends `count` zeros along a dim."""
    return tf.pad(tensor, [[0, count if each == dim else 0] for each in range(tensor.shape.rank)])


def _without_padding(padded: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
    """Concatenates the first `sizes[i]` rows of each slice i."""
    parts = zip(tf.unstack(padded, sizes.shape[0]), tf.unstack(sizes), strict=True)
    return tf.concat([part[:size] for part, size in parts], axis=0)


def _flatten_rows(stacked: tf.Tensor) -> tf.Tensor:
    """Joins dims 0 and 1."""
    parts, rows, *inner = shape_of(stacked)
    return tf.reshape(stacked, [parts * rows, *inner])
