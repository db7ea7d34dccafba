"""Two probes for what may come next: cuDNN's attention, and NCCL's sums inside programs that XLA compiles."""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf


def module_of(name: str, given: list, made: list, call: str) -> str:
    """The text of a StableHLO module with one function.

    Args:
        name: Its name.
        given: The types of its arguments, as "2x4xbf16".
        made: The types of its results.
        call: The operation, which defines `%0:n` or `%0`.
    """
    arguments = ", ".join(f"%a{number}: tensor<{each}>" for number, each in enumerate(given))
    types = ", ".join(f"tensor<{each}>" for each in made)
    places = ", ".join(f"%0#{number}" for number in range(len(made))) if len(made) > 1 else "%0"
    return f"module @{name} {{ func.func public @main({arguments}) -> ({types}) {{ {call} return {places} : {types} }} }}"


def run_module(text: str, arguments: list, shapes: list, dtypes: list, platform: str) -> list:
    """Calls a StableHLO module within a compiled function."""
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    @tf.function(jit_compile=True)
    def call(*given):
        return gen_xla_ops.xla_call_module(
            args=list(given), version=9, module=text, Sout=shapes, Tout=dtypes, platforms=[platform]
        )

    return call(*arguments)


def attention_module(batch: int, heads: int, length: int, size: int) -> str:
    """Causal attention of [batch, length, heads, size] as a call of cuDNN's fused attention.

    The configuration is `CudnnfMHABackendConfig` of XLA's gpu_backend_config.proto, as JAX writes it.
    """
    numbers = {
        "lhs_contracting_dimensions": ["3"], "rhs_contracting_dimensions": ["3"],
        "lhs_batch_dimensions": ["0", "2"], "rhs_batch_dimensions": ["0", "2"],
    }  # fmt: skip
    second = {**numbers, "rhs_contracting_dimensions": ["1"]}
    config = {
        "operation_queue_id": "0",
        "wait_on_operation_queues": [],
        "cudnn_fmha_backend_config": {
            "algorithm": {
                "algo_id": "0",
                "math_type": "TENSOR_OP_MATH",
                "tuning_knobs": {"17": "1", "24": "0"},
                "is_cudnn_frontend": True,
                "workspace_size": "0",
            },
            "fmha_scale": 1.0 / math.sqrt(size),
            "intermediate_tensor_shape": {
                "element_type": "BF16",
                "dimensions": [str(each) for each in (batch, heads, length, length)],
                "tuple_shapes": [],
                "layout": {
                    "dim_level_types": [],
                    "dim_unique": [],
                    "dim_ordered": [],
                    "minor_to_major": ["3", "2", "1", "0"],
                    "tiles": [],
                    "element_size_in_bits": "0",
                    "memory_space": "0",
                    "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
                    "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
                    "dynamic_shape_metadata_prefix_bytes": "0",
                },
                "is_dynamic_dimension": [False] * 4,
            },
            "is_flash_attention": True,
            "mask_type": "CAUSAL",
            "dropout_rate": 0.0,
            "seed": 42,
            "sliding_window_length": 0,
            "max_seg_per_batch": 1,
            "is_paged_attention": False,
            "bmm1_dot_dimension_numbers": numbers,
            "bmm2_dot_dimension_numbers": second,
        },
    }
    text = json.dumps(config).replace('"', "\\22")
    of_input = f"{batch}x{length}x{heads}x{size}xbf16"
    of_output = f"{batch}x{heads}x{length}x{size}xbf16"
    made = [of_output, "0xui8"]
    call = (
        f'%0:2 = stablehlo.custom_call @"__cudnn$fmhaSoftmax"(%a0, %a1, %a2) {{api_version = 2 : i32, '
        f'backend_config = "{text}", operand_layouts = [dense<[3, 2, 1, 0]> : tensor<4xindex>, '
        "dense<[3, 2, 1, 0]> : tensor<4xindex>, dense<[3, 2, 1, 0]> : tensor<4xindex>], "
        "result_layouts = [dense<[3, 1, 2, 0]> : tensor<4xindex>, dense<[0]> : tensor<1xindex>]} : "
        f"({', '.join([f'tensor<{of_input}>'] * 3)}) -> (tensor<{of_output}>, tensor<0xui8>)"
    )
    return module_of("attention", [of_input] * 3, made, call)


def attention(rehearse: bool) -> dict[str, Any]:
    """Whether cuDNN's fused attention runs, its largest difference to plain products, and its ms."""
    batch, heads, length, size = (1, 2, 64, 64) if rehearse else (8, 12, 1024, 64)
    draw = np.random.default_rng(0).normal(size=(3, batch, length, heads, size))
    query, key, value = tf.unstack(tf.constant(draw, tf.bfloat16))
    text = attention_module(batch, heads, length, size)
    shapes = [[batch, heads, length, size], [0]]
    has_gpu = bool(tf.config.list_physical_devices("GPU"))

    def fused() -> tf.Tensor:
        dtypes = [tf.bfloat16, tf.uint8]
        platform = "CUDA" if has_gpu else "CPU"
        return run_module(text, [query, key, value], shapes, dtypes, platform)[0]

    try:
        found = tf.cast(fused(), tf.float32)
    except (tf.errors.OpError, ValueError) as error:
        return {"runs": False, "said": str(error).strip().splitlines()[0][:200]}
    wide = [tf.transpose(tf.cast(each, tf.float32), [0, 2, 1, 3]) for each in (query, key, value)]
    scores = tf.matmul(wide[0], wide[1], transpose_b=True) / math.sqrt(size)
    seen = tf.linalg.band_part(tf.ones([length, length], tf.bool), -1, 0)
    expected = tf.matmul(tf.nn.softmax(tf.where(seen, scores, -1e9)), wide[2])
    began = time.perf_counter()
    for _ in range(20):
        made = fused()
    made.numpy()
    return {
        "runs": True,
        "difference": float(tf.reduce_max(tf.abs(found - expected))),
        "ms": (time.perf_counter() - began) / 20 * 1e3,
    }


def build(folder: Path) -> Path:
    """Compiles the handler of `ffi.cc`, which opens CUDA and NCCL only when it is called."""
    library = folder / "libtfdist_probe.so"
    source = Path(__file__).with_name("ffi.cc")
    flags = ["-O2", "-std=c++17", "-fPIC", "-shared", "-I", tf.sysconfig.get_include()]
    command = [
        "c++",
        *flags,
        str(source),
        "-o",
        str(library),
        *tf.sysconfig.get_link_flags(),
        "-ldl",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return library


def sums(rehearse: bool) -> dict[str, Any]:
    """Whether a handler that calls NCCL on XLA's stream gives right sums on two ranks; on CPUs one that copies."""
    from tfdist.testing import RankPool

    with tempfile.TemporaryDirectory() as folder:
        prebuilt = os.environ.get("TFDIST_PROBE_LIBRARY")
        library = Path(prebuilt) if prebuilt else build(Path(folder))
        # The handler has to be known before TensorFlow registers its XLA kernels.
        with RankPool(2, "horovod", environment={"TFDIST_PROBE_LIBRARY": str(library)}) as pool:
            answers = pool.run(_sums, timeout=80.0)
    return answers[0]


def _sums() -> dict[str, Any]:
    import ctypes

    from tfdist.collectives.objects import broadcast_object
    from tfdist.testing import engine

    library = ctypes.CDLL(os.environ["TFDIST_PROBE_LIBRARY"])
    world = engine()
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    if has_gpu:
        identity = ctypes.create_string_buffer(128)
        if world.rank == 0 and library.tfdist_probe_id(identity):
            return {"runs": False, "said": "ncclGetUniqueId failed"}
        told = broadcast_object(identity.raw, world.group(), name="probe")
        if library.tfdist_probe_join(told, world.rank, world.size):
            return {"runs": False, "said": "ncclCommInitRank failed"}
    count = 1 << 20
    kind = f"{count}xf32"
    call = (
        f"%0 = stablehlo.custom_call @tfdist_probe_sum(%a0) {{api_version = 4 : i32, has_side_effect = true, "
        f"backend_config = {{}}}} : (tensor<{kind}>) -> tensor<{kind}>"
    )
    text = module_of("sum", [kind], [kind], call)
    x = tf.fill([count], world.rank + 1.0)

    def run() -> tf.Tensor:
        return run_module(text, [x], [[count]], [tf.float32], "CUDA" if has_gpu else "CPU")[0]

    try:
        total = run()
    except (tf.errors.OpError, ValueError) as error:
        return {"runs": False, "said": str(error).strip().splitlines()[0][:200]}
    expected = 3.0 if has_gpu else world.rank + 1.0
    began = time.perf_counter()
    for _ in range(20):
        total = run()
    right = bool(tf.reduce_all(total == expected))
    return {"runs": True, "right": right, "ms": (time.perf_counter() - began) / 20 * 1e3}
