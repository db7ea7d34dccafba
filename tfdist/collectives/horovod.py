"""Horovod as an engine: raw operations on static process sets.

Horovod's wrappers of Keras and optimizers are not used, since they do not support Keras 3.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
import socket
import types
from collections.abc import Callable

import psutil
import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.native import TRANSPORT
from tfdist.collectives.engine import Engine, reduce_locally, split_rows
from tfdist.collectives.flight_counts import outermost_is_eager
from tfdist.collectives.group import Group
from tfdist.collectives.p2p import P2PEngine, with_p2p
from tfdist.collectives.rank_sets import rank_sets
from tfdist.mesh import Mesh
from tfdist.runtime.horovod_variables import find_nccl, has_nccl, started_by_horovod
from tfdist.runtime.schedulers import join, started_by_scheduler
from tfdist.utils import checks
from tfdist.utils.untested import say_untested

_logger = logging.getLogger("tfdist")

_OPERATORS = {"sum": "Sum", "mean": "Average", "max": "Max", "min": "Min"}
#: Horovod's default polling interval, in ms. With its own default of 1 ms polling takes up to a fifth
#: of a core that also computes.
_CYCLE_MS = 2.5
#: If latency-critical operations use peer-to-peer messages, and Horovod only reduces gradients.
_CYCLE_MS_FOR_GRADIENTS = 5.0
#: If all operations use peer-to-peer messages.
_CYCLE_MS_AT_REST = 25.0
#: Between GPUs, whose steps are short and leave the cores idle.
_CYCLE_MS_ON_GPUS = 0.2


def _cycle_ms(mesh: Mesh, has_p2p: bool, by_nccl: bool) -> float:
    """Horovod's polling interval on a resolved mesh, in ms."""
    if by_nccl:
        # The computation waits for collectives within a replica of the model.
        return _CYCLE_MS_ON_GPUS if _has_only_replicas(mesh) else 0.0
    if not has_p2p:
        return _CYCLE_MS
    return _CYCLE_MS_AT_REST if mesh.size <= P2PEngine.max_group_size else _CYCLE_MS_FOR_GRADIENTS


def _has_only_replicas(mesh: Mesh) -> bool:
    return mesh.size == math.prod(mesh.shape[axis] for axis in mesh.replica_axes)


def start(mesh: Mesh | None = None, *, deterministic: bool = False) -> Engine:
    """Horovod, in combination with peer-to-peer messages if these are possible.

    Args:
        mesh: The mesh, which is resolved for Horovod's world.
        deterministic: As in `HorovodEngine`.
    """
    expects_p2p = TRANSPORT.find() is not None
    engine = HorovodEngine(mesh, deterministic=deterministic, has_p2p=expects_p2p)
    found = with_p2p(engine)
    if expects_p2p and found is engine and engine.size > 1:
        _logger.warning(
            "Horovod polls every %s ms, which is meant for ranks with peer-to-peer messages. Without "
            "them set HOROVOD_CYCLE_TIME=%s.",
            os.environ.get("HOROVOD_CYCLE_TIME"),
            _CYCLE_MS,
        )
    return found


def import_horovod() -> types.ModuleType:
    """Returns `horovod.tensorflow`.

    Raises:
        ImportError: Horovod is missing, or was built for another TensorFlow.
    """
    _load_nccl()
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise ImportError(
            "Horovod cannot be imported. Build it for the installed TensorFlow with "
            f"`tfdist-install-horovod`, or use MultiWorkerStrategy. The error was: {error}"
        ) from error
    return hvd


@functools.cache
def _load_nccl() -> None:
    """Loads the NCCL that `tensorflow[and-cuda]` installs, for a Horovod that was built with NCCL.

    Whoever asks for it by name afterwards, Horovod and TensorFlow, gets this copy: two in a process do not
    share their state.
    """
    folder = find_nccl() if has_nccl() else None
    if folder is not None:
        ctypes.CDLL(str(folder / "lib" / "libnccl.so.2"), mode=ctypes.RTLD_GLOBAL)


class HorovodEngine(Engine):
    """Horovod's Gloo, MPI or NCCL operations.

    Process sets are created once, when Horovod starts: sets that are added later cost a round of
    communication at every use of Horovod. So `send` and `recv` reach ranks along `mesh.message_axes`, and
    the other rank of any group of two.

    Args:
        mesh: The mesh, which is resolved for Horovod's world.
        deterministic: Whether each tensor is reduced separately. By default Horovod fuses tensors that
            are ready at the same time, and the position of a number in the fused buffer determines the
            order of the ranks in its sum.
        has_p2p: Whether latency-critical operations will use peer-to-peer messages, so that Horovod's
            polling interval can be longer.
    """

    name = "horovod"
    reduce_as = {tf.bfloat16: tf.float32, tf.uint16: tf.int32, tf.int16: tf.int32}
    move_as = {tf.bfloat16: tf.uint16, tf.uint32: tf.int32, tf.uint64: tf.int64}

    def __init__(
        self, mesh: Mesh | None = None, deterministic: bool = False, has_p2p: bool = False
    ):
        checks.instance("mesh", mesh, Mesh, "a tfdist.Mesh", optional=True)
        self.is_deterministic = checks.boolean("deterministic", deterministic)
        self._hvd = hvd = import_horovod()
        scheduled, started = started_by_scheduler(), started_by_horovod()
        if scheduled and not started:
            if not hvd.mpi_built():
                join("horovod", scheduled)
            started = scheduled.rank, scheduled.size
        rank, size = started or (0, 1)
        resolved = (mesh or Mesh()).resolve(size=size, rank=rank)
        sets = {ranks: hvd.ProcessSet(list(ranks)) for ranks in rank_sets(resolved)}
        if hvd.is_initialized():
            raise RuntimeError(
                "Horovod must not be initialized before the strategy: Horovod is already running in this "
                "process. Remove the call of hvd.init(): the strategy starts Horovod with the process "
                "sets of its mesh."
            )
        # Horovod reads its settings only from the environment.
        self._by_nccl = hvd.nccl_built() and devices.has_gpu()
        cycle_ms = _cycle_ms(resolved, has_p2p, self._by_nccl)
        os.environ.setdefault("HOROVOD_CYCLE_TIME", str(cycle_ms))
        if self._by_nccl and all(resolved.shape[axis] == 1 for axis in resolved.replica_axes):
            # The stream waits for the collective in place of the host. With a data axis that would also
            # delay the backward pass behind sums of gradients.
            os.environ.setdefault("HOROVOD_ENABLE_ASYNC_COMPLETION", "1")
        if deterministic:
            os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
        hvd.init(process_sets=list(sets.values()))
        if (hvd.rank(), hvd.size()) != (rank, size):
            raise RuntimeError(
                f"Horovod's rank {hvd.rank()} of {hvd.size()} is not that of its launcher, {rank} of "
                f"{size}. Start the ranks with `tfdist-run`."
            )
        if self._by_nccl:
            say_untested("NCCL (in this build of Horovod)")
        elif devices.has_gpu() and size > 1 and rank == 0:
            _logger.warning(
                "Horovod was built without NCCL: tensors of the ranks' GPUs go through the memory of the host. "
                "Build it with `tfdist-install-horovod --gpu_operations=nccl`, or start the ranks with "
                "`tfdist-run --engine=tensorflow`."
            )
        self._sets = {tuple(range(resolved.size)): hvd.global_process_set, **sets}
        super().__init__(resolved)

    def all_reduce(self, tensor, group, reduction, name):
        """`hvd.allreduce`."""
        operator = getattr(self._hvd, _OPERATORS[reduction])
        return self._run(self._hvd.mpi_ops._allreduce, tensor, group, name, op=operator)

    def all_gather(self, tensor, group, name):
        """`hvd.allgather`, which supports different sizes."""
        return self._run(self._hvd.allgather, tensor, group, name)

    all_gather_uneven = all_gather

    def reduce_scatter(self, tensor, group, reduction, name):
        """`hvd.reducescatter`; for max and min, which it lacks, an exchange and a local reduce."""
        if reduction in ("max", "min"):
            # Horovod's response cache crashes if a name is used for two kinds of operations.
            received = self.all_to_all(tensor, group, f"{name}/exchange")
            return reduce_locally(split_rows(received, group.size), reduction)
        operator = getattr(self._hvd, _OPERATORS[reduction])
        return self._run(self._hvd.mpi_ops._reducescatter, tensor, group, name, op=operator)

    def all_to_all(self, tensor, group, name):
        """`hvd.alltoall`."""
        return self._run(self._hvd.alltoall, tensor, group, name)

    def all_to_all_uneven(self, tensor, splits, group, name):
        """`hvd.alltoall` with splits."""
        return self._run(self._hvd.alltoall, tensor, group, name, splits=splits)

    def broadcast(self, tensor, root, group, name):
        """`hvd.broadcast`, whose root is a rank of the world."""
        return self._run(self._hvd.broadcast, tensor, group, name, root_rank=group.ranks[root])

    def uses_host(self, operation, dtype):
        """Also without NCCL, since Horovod's other operations are for the host."""
        return not self._by_nccl or super().uses_host(operation, dtype)

    def host_address(self):
        """The address of the network interface that Gloo uses, or that of this host's name."""
        interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
        for address in psutil.net_if_addrs().get(interface, []):
            if address.family == socket.AF_INET:
                return address.address
        if self._hvd.local_size() == self.size:
            return "127.0.0.1"
        return socket.gethostbyname(socket.gethostname())

    def shutdown(self) -> None:
        """Ends Horovod's background thread; collectives of other ranks then fail."""
        super().shutdown()
        self._hvd.shutdown()

    def _check_group(self, ranks):
        self._process_set(ranks)

    def _process_set(self, ranks):
        if ranks not in self._sets:
            raise ValueError(
                f"Process set not found for the ranks {ranks}: Horovod creates its sets at start-up, for "
                f"the groups of the mesh. Received: {self.mesh!r}."
            )
        return self._sets[ranks]

    def _run(self, operation: Callable, tensor: tf.Tensor, group: Group, name: str, **options):
        # Names are already the same on all ranks; TensorFlow's scopes need not be. With
        # `ignore_name_scope` Horovod uses the part after the last "/" of a node's name.
        return operation(
            _varying(tensor),
            name=name.replace("+", "-").replace("/", ">"),
            ignore_name_scope=True,
            process_set=self._process_set(group.ranks),
            **options,
        )


def _varying(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, in a form that TensorFlow does not treat as a constant.

    Horovod's operations are not marked as stateful: one with a constant input would run during the
    optimization of the graph, and on this rank only, if other ranks' inputs are not constant.
    """
    if tf.executing_eagerly():
        return tensor
    # A slice of the whole tensor copies nothing, and its begin is only known at run time.
    # A variable in a graph of TensorFlow 1 would require an initializer to be run.
    zero = _zero() if outermost_is_eager() else tf.cast(tf.timestamp() < 0.0, tf.int32)
    begin = tf.zeros([tensor.shape.rank], tf.int32) + zero
    return tf.ensure_shape(tf.slice(tensor, begin, [-1] * tensor.shape.rank), tensor.shape)


@functools.cache
def _zero() -> tf.Variable:
    """A zero that is only known at run time."""
    with tf.init_scope(), tf.device("/CPU:0"):
        return tf.Variable(0, trainable=False, name="zero")
