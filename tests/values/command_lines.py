"""The flags of all programs, with command lines in which one of them has a bad value.

What is tried comes from the flags: a new one, and a new program, are tried as soon as they are
there. The tables here hold only what no flag tells.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

from absl import flags

from benchmarks import environments, training
from tests.values.bad_values import random_texts
from tfdist.launch.flags.command import Program

__all__ = ["COMPANIONS", "LEGAL", "BadLine", "bad_lines", "base_of", "programs", "random_lines"]

#: What a command line has beside the flag that is tried, so that it would be right.
_BASES: dict[str, tuple[list[str], list[str]]] = {
    "tfdist-run": (["--np=2"], ["--", "true"]),
    "tfdist-finetune": ([f"--preset={Path(__file__).with_name('preset')}"], []),
    "tfdist-plan fit": ([], [str(Path(__file__).with_name("runs.jsonl"))]),
    "tfdist-plan optimum": (["--flops=1e21"], []),
    "tfdist-report": ([], [__file__]),
    "tfdist-launch slurm": (["--np=2"], ["--", "true"]),
    "tfdist-launch kubernetes": (["--np=2", "--image=train:1"], ["--", "true"]),
}

#: Flags that go with another only. By program and flag; a star is any flag that is not named.
COMPANIONS: dict[tuple[str, str], list[str]] = {
    ("tfdist-run", "restart_seconds"): ["--max_restarts=1"],
    ("tfdist-run", "min_np"): ["--host_discovery_script=true"],
    ("tfdist-run", "exclude_after"): ["-H=localhost:2", "--max_restarts=1"],
    ("tfdist-run", "max_np"): ["--host_discovery_script=true"],
    ("tfdist-train", "num_microbatches"): ["--model=gpt", "--pipeline=2"],
    ("tfdist-train", "schedule"): ["--model=gpt", "--pipeline=2"],
    ("tfdist-train", "chunks"): ["--model=gpt", "--pipeline=2", "--schedule=interleaved"],
    ("tfdist-train", "tensor"): ["--model=gpt"],
    ("tfdist-train", "context"): ["--model=gpt"],
    ("tfdist-train", "context_attention"): ["--model=gpt", "--context=2"],
    ("tfdist-train", "tpu"): ["--strategy=tpu"],
    ("tfdist-train", "plan"): ["--model=gpt"],
    ("tfdist-train", "warmup_epochs"): ["--lr_scaling=linear"],
    **{("tfdist-train", name): ["--monitor"] for name in ("monitor_json", "trace", "peak")},
    ("tfdist-train", "save_every"): ["--workdir=checkpoints"],
    ("tfdist-train", "keep"): ["--workdir=checkpoints"],
    **{
        ("tfdist-train", name): ["--model=gpt"]
        for name in ("layers", "width", "heads", "seq_length", "dropout", "sample")
    },
    ("tfdist-train", "sequence_parallel"): ["--model=gpt"],
    ("tfdist-train", "experts"): ["--model=gpt"],
    ("tfdist-train", "top_k"): ["--model=gpt", "--experts=1000"],
    ("tfdist-train", "expert"): ["--model=gpt", "--experts=8"],
    **{("tfdist-finetune", name): ["--pipeline=2"] for name in ("num_microbatches", "schedule")},
    ("tfdist-finetune", "chunks"): ["--pipeline=2", "--schedule=interleaved"],
    ("tfdist-finetune", "tpu"): ["--strategy=tpu"],
    ("tfdist-finetune", "save_every"): ["--workdir=checkpoints"],
    ("tfdist-finetune", "keep"): ["--workdir=checkpoints"],
    ("tfdist-finetune", "quantize"): ["--lora_rank=8"],
    ("tfdist-finetune", "train_biases"): ["--lora_rank=8"],
    ("tfdist-finetune", "block_size"): ["--lora_rank=8", "--quantize=int4"],
    ("tfdist-finetune", "data_dir"): ["--dataset=tfds:imdb_reviews"],
    ("tfdist-schedule", "chunks"): ["--schedule=interleaved"],
    ("tfdist-launch slurm", "gpu_type"): ["--gpu"],
    ("tfdist-launch kubernetes", "gpu_resource"): ["--gpu"],
    ("tfdist-launch kubernetes", "launcher"): ["--kind=mpijob"],
    ("tfdist-launch kubernetes", "ssh_auth_mount_path"): ["--kind=mpijob"],
    ("tfdist-launch kubernetes", "nodes"): ["--kind=mpijob"],
    ("tfdist-launch kubernetes", "ranks_per_node"): ["--kind=mpijob"],
}

_TEXTS = {
    "empty": "",
    "blank": "  ",
    "newline": "a\nb",
    "zero byte": "a\0b",
    "no UTF-8": "a\udcffb",
    "escape": "\x1b[31m",
    "endless": "a" * 200_000,
}
_NUMBERS = {
    "empty": "",
    "blank": " ",
    "nan": "nan",
    "infinity": "inf",
    "minus infinity": "-inf",
    "minus one": "-1",
    "zero": "0",
    "huge": "9" * 20,
    "endless": "9" * 5000,
    "word": "two",
    "no ASCII": "é",
    "with a unit": "10s",
    "two numbers": "1,2",
    "no UTF-8": "1\udcff",
}
_KINDS: dict[str, dict[str, str]] = {
    "integer": {**_NUMBERS, "fraction": "1.5", "scientific": "1e3"},
    "number": {**_NUMBERS, "too large": "1e999"},
    "choice": {**_TEXTS, "word": "no-such-choice", "number": "3", "no ASCII": "é"},
    "switch": {**_TEXTS, "word": "maybe", "number": "3"},
    "text": _TEXTS,
}
#: By the end of a flag's name or by the name: what is wrong for it beside what is for any text.
_MEANINGS: dict[str, dict[str, str]] = {
    "path to write": {
        "folder": "folder",
        "root": "/",
        "in no folder": "no/such/folder/file",
        "in a file": "file/file",
        "too long a name": "a" * 300,
    },
    "path to read": {"folder": "folder", "missing": "no-such-file", "in a file": "file/file"},
    "folder": {"root": "/", "roots": "//", "file": "file", "in a file": "file/inside"},
    "preset": {"missing": "no-such-folder", "file": "file", "no preset": "folder"},
    "text": {"missing file": "text:no-such-file", "word": "books", "no name": "tfds:"},
    "address": {"no bucket": "gs://", "no scheme": "nosuch://x", "http": "http://host/x"},
    "word": {
        "blank inside": "a b",
        "command": "$(id)",
        "two commands": "a;id",
        "quote": "a'b",
        "no ASCII": "é",
        "option": "-a",
        "300 characters": "a" * 300,
    },
    "path in a pod": {"relative": "a/b", "colon": "/a:b", "above": "/a/../b", "root": "/"},
    "time": {"25 hours": "1-25:00:00", "no unit": "90", "no time": "0s", "age": "999999999d"},
    "interval": {"no steps": "0", "no time": "0s", "fraction": "1.5", "age": "9999999999s"},
    "size": {"no unit": "16", "none": "0G", "negative": "-1G", "huge": "9" * 20 + "G", "word": "a"},
    "name or file": {"word": "no-such-name", "no such file": "folder/none", "other": "file"},
    "bytes": {"no unit": "16", "none": "0GB", "negative": "-1GB", "word": "a", "letters": "8 gib"},
    "seconds": {"zero": "0", "negative": "-1", "nan": "nan", "infinity": "inf", "word": "two"},
    "plan": {"word": "manual", "no such file": "auto:no-such-file", "no file": "auto:"},
    "hosts": {
        "no slots": "a:0",
        "slots": "a:99999999999999999999",
        "many": "a:1000000",
        "two": "a,,b",
        "word": "a:b",
    },
    "axes": {"unknown": "data,tensor,sequence", "twice": "data,data,tensor", "none": "a"},
    "set": {"missing file": "text:no-such-file", "path": "../a", "blank": "a b", "hyphen": "-a"},
    "choices": {"unknown": "no-such-choice", "number": "3"},
    "variable": {"no value": "A", "no name": "=a", "number": "1A=b"},
    "commit": {"unknown": "no-such-commit", "option": "--all", "a folder's": "HEAD:docs"},
    "label": {"no value": "a", "blank": "a=b c", "no ASCII": "é=1", "long": f"a={'b' * 64}"},
    "small word": {"blank": "a b", "capital": "A", "no ASCII": "é", "64 letters": "a" * 64},
    "resource": {"no domain": "gpu", "blank": "a/b c", "no ASCII": "é/gpu"},
    "volume": {"no path": "data", "relative": "data:a", "colon": "data:/a:rw", "name": "A:/a"},
    "option": {"no hyphen": "qos=high", "the script's": "--ntasks=5", "short": "-n5"},
}
#: The meaning of texts, which no flag tells.
_MEANING_OF: dict[tuple[str, str], str] = {
    ("tfdist-run", "H"): "hosts",
    ("tfdist-doctor", "H"): "hosts",
    ("tfdist-doctor", "folder"): "path to read",
    ("tfdist-train", "dataset"): "set",
    ("tfdist-train", "plan"): "plan",
    ("tfdist-plan layout", "preset"): "name or file",
    ("tfdist-plan layout", "machine"): "name or file",
    ("tfdist-plan layout", "memory"): "bytes",
    ("tfdist-plan layout", "picture"): "path to write",
    ("tfdist-plan calibrate", "output"): "path to write",
    ("tfdist-plan goodput", "interval"): "seconds",
    ("tfdist-train", "data_dir"): "folder",
    ("tfdist-train", "plot"): "path to write",
    ("tfdist-train", "workdir"): "folder",
    ("tfdist-train", "save_every"): "interval",
    ("tfdist-train", "monitor_json"): "path to write",
    ("tfdist-train", "trace"): "path to write",
    ("tfdist-train", "peak"): "path to read",
    ("tfdist-report", "output"): "path to write",
    ("tfdist-bench peak", "output"): "path to write",
    ("tfdist-train", "mesh_order"): "axes",
    ("tfdist-finetune", "preset"): "preset",
    ("tfdist-finetune", "dataset"): "text",
    ("tfdist-finetune", "data_dir"): "folder",
    ("tfdist-finetune", "workdir"): "folder",
    ("tfdist-finetune", "output"): "folder",
    ("tfdist-finetune", "save_every"): "interval",
    ("tfdist-finetune", "mesh_order"): "axes",
    ("tfdist-schedule", "picture"): "path to write",
    ("tfdist-schedule", "trace"): "path to write",
    ("tfdist-install-horovod", "cache_dir"): "folder",
    ("tfdist-bench collectives", "operations"): "choices",
    ("tfdist-bench collectives", "json"): "path to write",
    ("benchmarks.training", "only"): "choices",
    ("benchmarks.training", "against"): "commit",
    ("benchmarks.training", "json"): "path to write",
    ("benchmarks.training", "picture"): "path to write",
    ("benchmarks.training", "document"): "path to read",
    ("benchmarks.training", "allocator"): "path to read",
    ("benchmarks.environments", "peers"): "folder",
    ("tfdist-launch slurm", "time"): "time",
    ("tfdist-launch slurm", "memory"): "size",
    ("tfdist-launch slurm", "sbatch"): "option",
    ("tfdist-launch slurm", "env"): "variable",
    ("tfdist-launch slurm", "output"): "path to write",
    **{
        ("tfdist-launch slurm", name): "word"
        for name in ("name", "partition", "account", "log", "gpu_type", "chdir")
    },
    ("tfdist-launch kubernetes", "name"): "small word",
    ("tfdist-launch kubernetes", "namespace"): "small word",
    ("tfdist-launch kubernetes", "queue"): "small word",
    ("tfdist-launch kubernetes", "image"): "word",
    ("tfdist-launch kubernetes", "time"): "time",
    ("tfdist-launch kubernetes", "memory"): "size",
    ("tfdist-launch kubernetes", "shared_memory"): "size",
    ("tfdist-launch kubernetes", "env"): "variable",
    ("tfdist-launch kubernetes", "output"): "path to write",
    ("tfdist-launch kubernetes", "node_selector"): "label",
    ("tfdist-launch kubernetes", "gpu_resource"): "resource",
    ("tfdist-launch kubernetes", "volume"): "volume",
    ("tfdist-launch kubernetes", "chdir"): "path in a pod",
    ("tfdist-launch kubernetes", "ssh_auth_mount_path"): "path in a pod",
}
#: More of the same for flags that stand for two things.
_MORE_MEANINGS: dict[tuple[str, str], str] = {("tfdist-train", "workdir"): "address"}

#: Values that are right, by program and flag.
LEGAL: dict[tuple[str, str], set[str]] = {
    ("tfdist-doctor", "folder"): {"folder"},
    ("tfdist-run", "max_restarts"): {"zero"},
    ("tfdist-run", "ps"): {"zero"},
    ("tfdist-run", "restart_seconds"): {"zero"},
    ("tfdist-run", "save_seconds"): {"zero"},
    ("tfdist-run", "watchdog_seconds"): {"zero"},
    ("tfdist-train", "data"): {"minus one"},
    ("tfdist-train", "dropout"): {"zero"},
    ("tfdist-train", "sample"): {"zero"},
    ("tfdist-finetune", "ema"): {"zero"},
    ("tfdist-finetune", "clip_norm"): {"zero"},
    ("tfdist-finetune", "weight_decay"): {"zero"},
    ("tfdist-finetune", "momentum"): {"zero"},
    ("tfdist-train", "momentum"): {"zero"},
    ("tfdist-train", "overlap"): {"zero"},
    ("tfdist-train", "ema"): {"zero"},
    ("tfdist-train", "clip_norm"): {"zero"},
    ("tfdist-train", "weight_decay"): {"zero"},
    ("tfdist-train", "seed"): {"zero"},
    ("tfdist-train", "threads"): {"zero"},
    ("tfdist-bench peak", "threads"): {"zero"},
    ("tfdist-train", "verbose"): {"zero"},
    ("tfdist-train", "warmup_epochs"): {"zero"},
    ("tfdist-train", "watchdog_seconds"): {"zero"},
    ("tfdist-train", "zero_stage"): {"zero"},
    ("tfdist-plan fit", "flops"): {"huge"},
    ("tfdist-plan goodput", "restart_seconds"): {"zero"},
    ("tfdist-plan optimum", "flops"): {"huge"},
    ("tfdist-finetune", "data"): {"minus one"},
    **{
        ("tfdist-finetune", name): {"zero"}
        for name in (
            *("label_smoothing", "lora_rank", "loss_chunk", "patience", "sample_every", "seed"),
            *("show", "threads", "verbose", "watchdog_seconds", "zero_stage"),
        )
    },
    ("tfdist-launch slurm", "max_restarts"): {"zero"},
    ("tfdist-launch kubernetes", "max_restarts"): {"zero"},
    ("tfdist-launch kubernetes", "run_as_user"): {"zero"},
}


@dataclasses.dataclass(frozen=True)
class BadLine:
    """A command line with one bad value.

    Attributes:
        program: The program's name, with its part.
        flag: The flag.
        value_name: What is bad.
        value: The value.
        arguments: The command line, program name first.
    """

    program: str
    flag: str
    value_name: str
    value: str
    arguments: tuple[str, ...]

    @property
    def is_legal(self) -> bool:
        """Whether the table says that the value is right."""
        return self.value_name in LEGAL.get((self.program, self.flag), set())


def programs() -> dict[str, Program]:
    """The programs that an installed tfdist has, and those of the benchmarks that check flags, by name."""
    found: dict[str, Program] = {
        "benchmarks.training": training.PROGRAM,
        "benchmarks.environments": environments.PROGRAM,
    }
    scripts = importlib.metadata.distribution("tfdist").entry_points
    for script in scripts.select(group="console_scripts"):
        module = importlib.import_module(script.module)
        if hasattr(module, "PROGRAMS"):
            found |= {f"{script.name} {part}": each for part, each in module.PROGRAMS.items()}
        else:
            found[script.name] = module.PROGRAM
    return found


def base_of(program: str, flag: str = "") -> tuple[list[str], list[str]]:
    """What stands before and behind a flag that is tried."""
    before, behind = _BASES.get(program, ([], []))
    kept = [word for word in before if not word.startswith(f"--{flag}=")]
    return [program.split()[0], *kept, *COMPANIONS.get((program, flag), [])], behind


def bad_lines() -> Iterator[BadLine]:
    """Each flag of each program with each value that its kind does not allow."""
    for name, program in programs().items():
        for flag in _flags_of(program):
            for value_name, value in _bad_values(name, program.values[flag]).items():
                yield _line(name, flag, value_name, value)


def random_lines(count: int, seed: int) -> Iterator[BadLine]:
    """Each flag with texts of random characters, which may be right."""
    for name, program in programs().items():
        for flag in _flags_of(program):
            for number, value in enumerate(random_texts(count, seed)):
                yield _line(name, flag, f"random {number} of seed {seed}", value)


def _flags_of(program: Program) -> list[str]:
    """The flags of a program; messages name a flag, and not the alias that was given."""
    values = program.values
    return [flag for flag in values if not values[flag].help.startswith("Alias for ")]


def _line(program: str, flag: str, value_name: str, value: str) -> BadLine:
    before, behind = base_of(program, flag)
    arguments = (*before, f"--{flag}={value}", *behind)
    return BadLine(program, flag, value_name, value, arguments)


def _bad_values(program: str, flag: flags.Flag) -> dict[str, str]:
    found = dict(_KINDS[_kind_of(flag)])
    for table in (_MEANING_OF, _MORE_MEANINGS):
        if (program, flag.name) in table:
            found |= _MEANINGS[table[program, flag.name]]
    return found


def _kind_of(flag: flags.Flag) -> str:
    if isinstance(flag, flags.EnumFlag):
        return "choice"
    if flag.boolean:
        return "switch"
    parser = flag.parser
    if isinstance(parser, flags.IntegerParser):
        return "integer"
    return "number" if isinstance(parser, flags.FloatParser) else "text"
