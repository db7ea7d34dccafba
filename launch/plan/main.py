"""`tfdist-plan`: the fastest layouts of a model, and their cost.

tfdist-plan --preset=llama3-70b --machine=h100 --ranks=256 --dtype=mixed_bfloat16
tfdist-plan --layers=24 --width=1024 --heads=16 --machine=this.json --ranks=8
"""

from __future__ import annotations

import dataclasses
import sys

from tfdist.addons.planner import Limits, Machine, Plan, Transformer, plan
from tfdist.addons.planner.choice import summary
from tfdist.addons.planner.layouts import OPTIMIZERS, PRECISIONS
from tfdist.addons.planner.pictures import save_picture
from tfdist.addons.planner.programs import code, command_line, refusal
from tfdist.addons.planner.requirements import requirement, table
from tfdist.launch.flags import command
from tfdist.launch.flags.options import define_flags, option
from tfdist.launch.flags.values import UsageError, output_file
from tfdist.launch.plan.calibrating import CALIBRATE
from tfdist.launch.plan.laws import FIT, GOODPUT, OPTIMUM
from tfdist.launch.plan.options import SIZES, MachineOptions, ModelOptions
from tfdist.mesh import Mesh

_MESH = Mesh()
#: The supported formats of plots, by suffix.
_PICTURES = (".png", ".svg", ".pdf")


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """The options of the program; see the flags of the same names, and the options of each subject."""

    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    machine: MachineOptions = dataclasses.field(default_factory=MachineOptions)
    batch_size: int | None = option(None, "Samples per update [4 per rank]", least=1, most=1 << 24)
    dtype: str | None = option(
        None, "Dtype policy [mixed 16-bit, if the machine supports it]", choices=PRECISIONS
    )
    optimizer: str = option("adam", "Optimizer", choices=OPTIMIZERS)
    best: int = option(3, "Number of layouts to show", least=1, most=100)
    picture: str | None = option(None, "File for a plot of the layouts (.png, .svg, .pdf)")


_FLAGS = define_flags(PlanOptions)


def run() -> None:
    """Run the console script, or the subcommand that its first word names."""
    program, *words = sys.argv
    if words and words[0] in PROGRAMS:
        PROGRAMS[words[0]].run([program, *words[1:]])
    _LAYOUT.run(sys.argv)


def _check(_: list[str]) -> tuple[PlanOptions, Transformer, Machine, int, Limits]:
    options = _FLAGS.read()
    found, ranks = options.machine.read()
    limits = Limits(dtype=options.dtype or _fastest(found), optimizer=options.optimizer)
    if options.model.is_kerashub_preset:
        # The options that tfdist-finetune supports for KerasHub's layers.
        limits = dataclasses.replace(
            limits,
            axes=(*_MESH.replica_axes, *_MESH.stage_axes, *_MESH.weight_axes),
            recompute=("none", "sqrt", "every_layer"),
            sequence_parallel=(False,),
        )
    if PRECISIONS[limits.dtype].compute not in found.flops:
        raise UsageError(
            f"--dtype={limits.dtype} is not supported by {found.name}, which has rates for "
            f"{', '.join(found.flops)}."
        )
    if options.picture is not None:
        output_file("picture", options.picture, _PICTURES)
    return options, options.model.model(), found, ranks, limits


def _fastest(found: Machine) -> str:
    """The fastest dtype policy on a machine, of those with float32 weights."""
    for dtype in ("bfloat16", "float16"):
        if dtype in found.flops:
            return f"mixed_{dtype}"
    return "float32"


def _main(checked: tuple[PlanOptions, Transformer, Machine, int, Limits]) -> int:
    options, model, found, ranks, limits = checked
    batch = options.batch_size or 4 * ranks
    try:
        chosen = plan(
            model, found, global_batch=batch, ranks=ranks, limits=limits, best=options.best
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    print(
        f"{found.name} ({found.source}), {ranks} ranks, {batch} samples per update, --dtype={limits.dtype}.\n"
    )
    print(chosen)
    if not chosen.best:
        return 1
    print(f"\n{summary(chosen.best[0])}")
    if (asked := requirement(chosen.best[0], found)) is not None:
        print(f"\n{table(asked)}")
    if why := refusal(chosen.best[0].layout):
        print(f"\n{why}")
    else:
        _print_programs(options.model, model, chosen, batch)
    if options.picture is not None:
        try:
            save_picture(chosen, options.picture)
        except (ValueError, ImportError) as error:
            raise UsageError(f"--picture={options.picture} could not be written: {error}") from None
    return 0


def _print_programs(options: ModelOptions, model: Transformer, chosen: Plan, batch: int) -> None:
    preset = options.preset if options.is_kerashub_preset else None
    for place, each in enumerate(chosen.best, 1):
        line = command_line(options.command(model), each.layout, global_batch=batch)
        lines = code(model, each.layout, global_batch=batch, preset=preset)
        print(f"\n{place}. {line}\n\n{lines}")


_LAYOUT = command.Program(
    _main,
    _FLAGS.values,
    usage="tfdist-plan [calibrate|fit|goodput|optimum] [flags]",
    summary="Finds the layouts that train a transformer fastest, and prints their cost.",
    check=_check,
    folded={"for a model by sizes": SIZES},
)

PROGRAMS = {
    "layout": _LAYOUT,
    "calibrate": CALIBRATE,
    "fit": FIT,
    "goodput": GOODPUT,
    "optimum": OPTIMUM,
}


if __name__ == "__main__":
    run()
