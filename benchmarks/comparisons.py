"""What `python -m benchmarks.training` compares with what, and the most that the ratio may be: data only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

#: Of the models and their global batches. The large ones are where the parameters' memory counts most,
#: the tiny ones are to try whether all runs.
SIZES: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "full": {
        "gpt": {
            "layers": 4,
            "width": 256,
            "heads": 4,
            "tokens": 128,
            "vocabulary": 512,
            "batch": 16,
        },
        "convnet": {"side": 32, "classes": 10, "batch": 64},
        "mlp": {"features": 784, "layers": 3, "hidden": 512, "classes": 10, "batch": 256},
        # GPT-2 small. `rank` is that of adapters; `prompt` and `written` are tokens of generation;
        # `packed` are the rows of a batch of packed conversations.
        "gpt2": {
            "layers": 12,
            "width": 768,
            "heads": 12,
            "tokens": 128,
            "positions": 1024,
            "vocabulary": 50_257,
            "batch": 4,
            "rank": 8,
            "prompt": 16,
            "written": 64,
            "conversations": 32,
            "packed": 2,
        },
        "dlrm": {
            "tables": 26,
            "vocabulary": 50_000,
            "width": 32,
            "dense": 13,
            "hidden": 128,
            "batch": 2048,
        },
    },
    "large": {
        "gpt": {
            "layers": 12,
            "width": 768,
            "heads": 12,
            "tokens": 128,
            "vocabulary": 8192,
            "batch": 8,
        },
        "convnet": {"side": 64, "classes": 10, "batch": 64},
        "mlp": {"features": 784, "layers": 6, "hidden": 2048, "classes": 10, "batch": 256},
        "dlrm": {
            "tables": 26,
            "vocabulary": 500_000,
            "width": 32,
            "dense": 13,
            "hidden": 512,
            "batch": 8192,
        },
    },
    "tiny": {
        "gpt": {"layers": 2, "width": 32, "heads": 2, "tokens": 16, "vocabulary": 64, "batch": 8},
        "convnet": {"side": 8, "classes": 10, "batch": 8},
        "mlp": {"features": 8, "layers": 2, "hidden": 16, "classes": 10, "batch": 8},
        "gpt2": {
            "layers": 2,
            "width": 32,
            "heads": 2,
            "tokens": 16,
            "positions": 32,
            "vocabulary": 63,
            "batch": 4,
            "rank": 2,
            "prompt": 4,
            "written": 8,
            "conversations": 8,
            "packed": 2,
        },
        "dlrm": {
            "tables": 3,
            "vocabulary": 50,
            "width": 4,
            "dense": 3,
            "hidden": 8,
            "batch": 8,
        },
    },
}


@dataclasses.dataclass(frozen=True)
class Job:
    """What one side of a comparison runs.

    Attributes:
        title: What the table calls it.
        program: A module of peers/.
        environment: The folder of its environment among those that `make peers` makes; None for
            the one that tfdist runs in.
        meeting: How its ranks meet: "horovod", "tensorflow", "torch", "jax" or "local".
        ranks: How many.
        threads: Of each.
        options: For the program.
        variables: Of its environment.
        without: Packages that are not there for it.
    """

    title: str
    program: str
    environment: str | None
    meeting: str
    ranks: int = 2
    threads: int = 1
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    without: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two jobs that run the same model.

    Attributes:
        name: What `--only` calls it.
        model: Which of `SIZES`.
        ours: The job whose time is divided.
        theirs: The job that it is divided by.
        limit: The most that the ratio of the step times may be.
    """

    name: str
    model: str
    ours: Job
    theirs: Job
    limit: float


#: Keras imports these where they happen to be installed, for what training does not use: 95 MiB that
#: the others' environments have no chance to spend.
UNUSED = ("matplotlib", "scipy", "sklearn")


def _ours(
    title: str, engine: str = "horovod", ranks: int = 2, threads: int = 1, **options: Any
) -> Job:
    return Job(
        f"tfdist, {title}",
        "tfdist_ranks",
        None,
        engine,
        ranks,
        threads,
        options={"engine": engine, **options},
        without=UNUSED,
    )


def _torch(title: str, program: str, **options: Any) -> Job:
    return Job(f"PyTorch {title}", program, "torch", "torch", options=options)


_MICROBATCHES = 8

_DATA = _ours("data parallel")
_DATA_TENSORFLOW = _ours("data parallel on TensorFlow's collectives", "tensorflow")
_ONE_PROCESS = _ours("one process", "local", ranks=1, threads=2)
#: The GPT of tf_keras is written by hand, or of Keras' own attention and embedding.
_STOCK = {False: "", True: ", stock layers"}
#: What makes TensorFlow's `keras`, which Horovod uses, the one of before Keras 3.
_LEGACY = {"TF_USE_LEGACY_KERAS": "1"}


def _horovod(stock: bool) -> Job:
    return Job(
        "tf_keras and Horovod" + _STOCK[stock],
        "keras_horovod",
        "tf_keras",
        "horovod",
        options={"stock": stock},
        # In milliseconds.
        variables={**_LEGACY, "HOROVOD_CYCLE_TIME": "1"},
    )


def _mirrored(stock: bool) -> Job:
    return Job(
        "tf_keras and MultiWorkerMirroredStrategy" + _STOCK[stock],
        "keras_multi_worker",
        "tf_keras",
        "tensorflow",
        options={"stock": stock},
        variables=_LEGACY,
    )


def _jax(
    title: str, ranks: int = 1, devices: int = 1, pool: int | None = None, **options: Any
) -> Job:
    """Keras on JAX; `pool` is the size of XLA's pool, where it is to be larger than the threads."""
    larger = {} if pool is None else {"NPROC": str(pool)}
    return Job(
        f"Keras on JAX, {title}",
        "keras_jax",
        "jax",
        "jax",
        ranks,
        threads=2 // ranks,
        options=options,
        variables={
            "KERAS_BACKEND": "jax",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            **larger,
        },
    )


_HOROVOD, _MIRRORED = _horovod(stock=False), _mirrored(stock=False)
_DDP = _torch("DDP", "torch_data_parallel")
_COMPILED = dataclasses.replace(
    _torch("DDP, compiled", "torch_data_parallel", compiled=True),
    # Else each rank keeps processes that compile, which take memory and no part in the training.
    variables={"TORCHINDUCTOR_COMPILE_THREADS": "1"},
)

_BOTH_MODELS = {
    "horovod": (_DATA, _HOROVOD, 0.75),
    "mirrored": (_DATA, _MIRRORED, 0.85),
    "ddp": (_DATA, _DDP, 1.0),
    "tensorflow-mirrored": (_DATA_TENSORFLOW, _MIRRORED, 1.0),
    "one-process": (_DATA, _ONE_PROCESS, 1.0),
    "ddp-compiled": (_DATA, _COMPILED, 0.6),
    "jax": (_ONE_PROCESS, _jax("one process"), 0.55),
    "jax-devices": (_DATA, _jax("DataParallel, 2 devices", devices=2, distribution="data"), 0.6),
    "jax-processes": (_DATA, _jax("DataParallel, 2 processes", ranks=2, distribution="data"), 0.6),
}


def _pipeline(ours: str, theirs: str) -> tuple[Job, Job, float]:
    schedule = {"num_microbatches": _MICROBATCHES, "schedule": ours}
    return (
        _ours(f"pipeline, {ours}", mesh={"pipeline": 2}, pipeline=schedule),
        _torch(
            f"pipelining, {theirs}",
            "torch_pipeline",
            schedule=theirs,
            microbatches=_MICROBATCHES,
        ),
        1.0,
    )


#: Each rank holds a part of the tables; the others hold all, and gather each other's sparse gradients.
_DLRM_ONLY = {
    "horovod": (_ours("sharded embeddings"), _HOROVOD, 0.6),
    "one-process": (_ours("sharded embeddings"), _ONE_PROCESS, 1.0),
}

_GPT_ONLY = {
    "horovod-stock": (_DATA, _horovod(stock=True), 0.75),
    "mirrored-stock": (_DATA, _mirrored(stock=True), 0.85),
    "tensor": (
        _ours("tensor parallel", mesh={"tensor": 2}),
        _torch("tensor parallel, DTensor", "torch_tensor_parallel"),
        1.0,
    ),
    "jax-tensor": (
        _ours("tensor parallel", mesh={"tensor": 2}),
        # In a pool of two, both threads come to wait for the other device's part of a sum.
        _jax("ModelParallel, 2 devices", devices=2, pool=4, distribution="model"),
        0.6,
    ),
    "pipeline-gpipe": _pipeline("gpipe", "GPipe"),
    "pipeline-1f1b": _pipeline("1f1b", "1F1B"),
    "experts": (
        _ours(
            "8 experts on 2 ranks",
            mesh={"data": 1, "expert": 2},
            experts={"num_experts": 8, "top_k": 2, "experts": {"balance_loss": 0.0}},
        ),
        _torch("8 experts on 2 ranks, all-to-all", "torch_experts", experts=8, top_k=2),
        1.0,
    ),
    "fsdp": (_ours("ZeRO-3", zero_stage=3), _torch("FSDP2", "torch_fully_sharded"), 1.0),
}

#: By name, the model and the job of tfdist that `--against` runs on two trees: each kind once.
ROWS: Mapping[str, tuple[str, Job]] = {
    "mlp-data": ("mlp", _DATA),
    "convnet-data": ("convnet", _DATA),
    "convnet-tensorflow": ("convnet", _DATA_TENSORFLOW),
    "convnet-one-process": ("convnet", _ONE_PROCESS),
    "dlrm-embeddings": ("dlrm", _DLRM_ONLY["horovod"][0]),
    "gpt-data": ("gpt", _DATA),
    "gpt-tensorflow": ("gpt", _DATA_TENSORFLOW),
    "gpt-one-process": ("gpt", _ONE_PROCESS),
    "gpt-tensor": ("gpt", _GPT_ONLY["tensor"][0]),
    "gpt-pipeline-gpipe": ("gpt", _GPT_ONLY["pipeline-gpipe"][0]),
    "gpt-pipeline-1f1b": ("gpt", _GPT_ONLY["pipeline-1f1b"][0]),
    "gpt-experts": ("gpt", _GPT_ONLY["experts"][0]),
    **{
        f"gpt-zero-{stage}": ("gpt", _ours(f"ZeRO-{stage}", zero_stage=stage))
        for stage in (1, 2, 3)
    },
    "gpt-recompute": ("gpt", _ours("recompute", recompute="every_layer")),
}


def _xla(name: str) -> Comparison:
    """Steps as they are by default on CPUs, and steps that XLA compiles."""
    model, job = ROWS[name]
    compiled = dataclasses.replace(
        job, title=f"{job.title}, compiled", options={**job.options, "jit_compile": True}
    )
    return Comparison(f"{name}-xla", model, job, compiled, 1.0)


#: All of them, by name.
COMPARISONS: Mapping[str, Comparison] = {
    **{
        f"{model}-{name}": Comparison(f"{model}-{name}", model, *sides)
        for model, found in (
            ("gpt", _BOTH_MODELS | _GPT_ONLY),
            ("convnet", _BOTH_MODELS),
            ("dlrm", _DLRM_ONLY),
        )
        for name, sides in found.items()
    },
    **{f"{name}-xla": _xla(name) for name in ROWS if name.startswith(("gpt", "convnet"))},
}
