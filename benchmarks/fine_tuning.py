"""Fine-tuning a GPT-2 of KerasHub by LoRA: beside KerasHub on TensorFlow and JAX, and transformers and peft.

    make peers                          # PyTorch, transformers and peft, in .peers/torch, and others
    python -m benchmarks.fine_tuning [--only=zero] [--rounds=7] [--json=fine_tuning.json]

The model is as large as GPT-2 small, with random weights and adapters on the projections of query and
value; nothing is downloaded. The jobs take turns as those of `python -m benchmarks.training` do.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks import findings
from benchmarks.comparisons import SIZES, UNUSED, Comparison, Job
from benchmarks.findings import Finding
from benchmarks.jobs import JobError
from benchmarks.measuring import parser, write_between
from benchmarks.peers.serving import conversations
from benchmarks.training import compare

MODEL = "gpt2"
#: Of the time that one process takes to write, so that ranks write 0.9 of its tokens a second.
GENERATE_LIMIT = 1 / 0.9
#: What `--only` may be.
NAMES = (
    "one-process",
    "one-process-xla",
    "generate",
    "generate-xla",
    "tensor",
    "zero",
    "torch",
    "jax",
    "packed-torch",
    "packed-jax",
)
_MARK = "benchmarks.fine_tuning"


def comparisons(engine: str) -> Mapping[str, Comparison]:
    """What is compared, by name.

    Args:
        engine: Of tfdist's ranks.
    """
    tensor = _ours("tensor parallel", engine, "training", mesh={"tensor": 2}, zero_stage=0)
    writing = _ours("tensor parallel", engine, "generate", mesh={"tensor": 2}, zero_stage=0)
    zero = _ours("ZeRO-3", engine, "training", mesh={}, zero_stage=3)
    one, packed = _one_process("training"), _one_process("conversations")
    sides = {
        # Keras leaves out XLA on CPUs unless it is asked for.
        "one-process": (tensor, _plain("training", xla=False), 1.0),
        "one-process-xla": (tensor, _plain("training", xla=True), 1.0),
        "generate": (writing, _plain("generate", xla=False), GENERATE_LIMIT),
        "generate-xla": (writing, _plain("generate", xla=True), GENERATE_LIMIT),
        "tensor": (tensor, _peft("DTensor", "torch_lora_tensor_parallel"), 0.8),
        "zero": (zero, _peft("FSDP2", "torch_lora_fully_sharded"), 0.8),
        "torch": (one, _peft_alone("training"), 1.0),
        "jax": (one, _jax("training"), 1.0),
        "packed-torch": (packed, _peft_alone("conversations"), 1.0),
        "packed-jax": (packed, _jax("conversations"), 1.0),
    }
    return {name: Comparison(name, MODEL, *sides[name]) for name in NAMES}


def _ours(title: str, engine: str, measure: str, **options) -> Job:
    return Job(
        f"tfdist, {title}",
        "hub_tfdist",
        None,
        engine,
        options={"engine": engine, "measure": measure, **options},
        without=UNUSED,
    )


def _one_process(measure: str) -> Job:
    job = _ours("one process", "local", measure, mesh={}, zero_stage=0)
    return dataclasses.replace(job, ranks=1, threads=2)


def _plain(measure: str, xla: bool) -> Job:
    return Job(
        f"plain KerasHub, one process{', XLA' if xla else ''}",
        "hub_plain",
        None,
        "local",
        ranks=1,
        threads=2,
        options={"measure": measure, "jit_compile": xla},
        without=UNUSED,
    )


def _peft(title: str, program: str) -> Job:
    return Job(f"transformers and peft, {title}", program, "torch", "torch")


def _peft_alone(measure: str) -> Job:
    job = _peft("one process", "torch_lora")
    return dataclasses.replace(
        job, meeting="local", ranks=1, threads=2, options={"measure": measure}
    )


def _jax(measure: str) -> Job:
    return dataclasses.replace(
        _plain(measure, xla=True),
        title="KerasHub on JAX, one process",
        environment="keras_hub_jax",
        meeting="jax",
        variables={"KERAS_BACKEND": "jax"},
        without=(),
    )


def table(found: Sequence[Finding], sizes: Mapping[str, int]) -> str:
    """Tables of times, of what ranks use, of what is trained, and of tokens a second.

    Args:
        found: What was measured.
        sizes: Of the model.
    """
    trained = [
        (f"`{each.name}`", each.parameters, each.ours.trained, each.theirs.trained)
        for each in found
    ]
    parts = [findings.table(found)]
    parts.append(
        tabulate(
            trained,
            ("", "frozen and trained, without adapters", "this trains", "other trains"),
            tablefmt="pipe",
            intfmt=",",
        )
    )
    rates = [
        (
            f"`{each.name}`",
            *(
                f"{_tokens(each.name, sizes) / statistics.median(side.seconds):,.1f}"
                for side in (each.ours, each.theirs)
            ),
            f"{1 / each.ratio:.2f}",
            f"{1 / max(each.ratios):.2f} to {1 / min(each.ratios):.2f}",
            f"{1 / each.limit:.2f}",
        )
        for each in found
    ]
    if rates:
        head = (
            "",
            "this, tokens a second",
            "other, tokens a second",
            "ratio",
            "spread",
            "at least",
        )
        parts.append(tabulate(rates, head, tablefmt="pipe", disable_numparse=True))
    return "\n\n".join(parts)


def _tokens(name: str, sizes: Mapping[str, int]) -> int:
    """The tokens of a step: written ones, trained ones of conversations, or all."""
    if name.startswith("generate"):
        return sizes["batch"] * sizes["written"]
    if name.startswith("packed"):
        return sum(int(trained[1:].sum()) for _, trained in conversations(sizes))
    return sizes["batch"] * sizes["tokens"]


def main() -> int:
    """Prints the tables; exit code 1 where a ratio is above its limit or a job fails."""
    flags = parser(__doc__, NAMES)
    flags.set_defaults(rounds=7)
    flags.add_argument("--steps", type=int, default=2, help="The steps of each turn.")
    flags.add_argument(
        "--sizes", choices=["full", "tiny"], default="full", help="The sizes of the model."
    )
    flags.add_argument("--peers", default=".peers", help="The folder of `make peers`.")
    flags.add_argument("--document", help="A document for the tables.")
    options = flags.parse_args()
    found: list[Finding] = []
    failed = False
    for name, comparison in comparisons(options.engine).items():
        if options.only not in (None, name):
            continue
        try:
            measured = compare(
                comparison,
                sizes=options.sizes,
                peers=Path(options.peers),
                rounds=options.rounds,
                steps=options.steps,
                timeout=600.0,
            )
        except JobError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        found.append(measured)
        failed |= measured.is_over
        print(measured.row(), flush=True)
        if options.json:  # After each, so that nothing is lost when it is stopped.
            findings.write(Path(options.json), found)
    if found:
        tables = table(found, SIZES[options.sizes][MODEL])
        print(f"\n{tables}")
        if options.document:
            write_between(options.document, _MARK, tables)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
