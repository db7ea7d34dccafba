"""Dataclasses of options: their flags, what is read from a command line, and checks without one."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata

import pytest
from absl import flags

from tfdist.launch.flags.checkpoint import CheckpointOptions
from tfdist.launch.flags.local_sgd import LocalSGDOptions
from tfdist.launch.flags.mesh import MeshOptions
from tfdist.launch.flags.monitor import MonitorOptions
from tfdist.launch.flags.optimizer import OptimizerOptions, PresetOptimizerOptions
from tfdist.launch.flags.options import as_given, define_flags, names, option, refuse_ignored
from tfdist.launch.flags.values import UsageError
from tfdist.launch.plan.options import MachineOptions, ModelOptions
from tfdist.launch.train.language import NAMES, LanguageOptions
from tfdist.launch.train.world import OF_RANKS, StrategyOptions


@dataclasses.dataclass(frozen=True)
class Inner:
    depth: int = option(1, "Depth", least=1, most=9)
    words: tuple[str, ...] = option(("a", "b"), "Words")


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str | None = option(None, "Name")
    kind: str = option("one", "Kind", choices=("one", "two"))
    inner: Inner = dataclasses.field(default_factory=Inner)
    rate: float | None = option(None, "Rate", least=0.0, most=1.0)
    fast: bool = option(True, "Whether it is fast")
    count: int | str | None = option(None, "A count, or auto", least=1, most=8)
    set: tuple[str, ...] = option((), "A setting", is_repeated=True)
    steps: int | None = option(None, "Steps", least=1, shown=4)
    some: tuple[str, ...] | None = option(None, "Some")


def read(*arguments: str) -> Outer:
    found = define_flags(Outer, flags.FlagValues())
    found.values(["program", *arguments])
    return found.read()


def test_the_flags_are_those_of_the_fields_in_their_order():
    values = flags.FlagValues()
    define_flags(Outer, values)
    expected = ["name", "kind", "depth", "words", "rate", "fast", "count", "set", "steps", "some"]
    assert list(values) == expected == list(names(Outer)) == list(names(Outer()))
    assert names(Inner, without=["depth"]) == ("words",)
    shown = {name: values[name].default for name in values}
    assert shown == {
        **dict.fromkeys(("name", "rate", "count", "set", "some")),
        "kind": "one",
        "depth": 1,
        "words": ["a", "b"],
        "fast": True,
        "steps": 4,
    }
    assert values["set"].help == "A setting; may be repeated"
    assert values["kind"].help == "<one|two>: Kind"


def test_an_empty_command_line_yields_the_defaults():
    assert read() == Outer()


def test_a_command_line_is_read():
    line = "--name=x --kind=two --depth=9 --words=c,d --rate=0.5 --nofast --count=8 --some=e"
    assert read(*line.split(), "--set=A=1", "--set=B", "--steps=4") == Outer(
        name="x",
        kind="two",
        inner=Inner(depth=9, words=("c", "d")),
        rate=0.5,
        fast=False,
        count=8,
        set=("A=1", "B"),
        steps=4,
        some=("e",),
    )
    assert read("--count=auto").count == "auto"
    assert read("--steps=4") != read()  # The default of the help is not that of the field.


@pytest.mark.parametrize(
    "argument",
    [
        "--depth=0",
        "--depth=10",
        "--rate=1.5",
        "--count=9",
        "--count=some",
        "--kind=three",
        "--steps=0",
    ],
)
def test_bounds_and_choices_hold(argument):
    with pytest.raises(flags.IllegalFlagValueError, match=argument.partition("=")[0].strip("-")):
        read(argument)


def test_what_differs_from_the_defaults_is_given():
    assert as_given(Outer(), names(Outer)) == ""
    inner = Inner(depth=2, words=("c", "d"))
    found = Outer(kind="two", inner=inner, fast=False, count="auto", set=("A=1", "B"))
    expected = "--kind=two --depth=2 --words=c,d --nofast --count=auto --set=A=1 --set=B"
    assert as_given(found, names(Outer)) == expected
    assert as_given(found, ["words", "name", "kind"]) == "--words=c,d --kind=two"


def test_ignored_options_are_refused():
    found = Outer(rate=0.5, inner=Inner(depth=2))
    refuse_ignored(found, ["name", "words"], "requires --kind=two", "--kind=one")
    with pytest.raises(UsageError) as refused:
        refuse_ignored(found, ["name", "depth", "rate"], "requires --kind=two", "--kind=one")
    assert str(refused.value) == "--depth requires --kind=two. Received: --depth=2 --kind=one."


def test_the_groups_of_the_help_name_options():
    assert sorted(NAMES) == sorted(names(LanguageOptions))
    assert {*OF_RANKS} <= {*names(StrategyOptions)}
    entries = importlib.metadata.distribution("tfdist").entry_points
    for entry in entries.select(group="console_scripts"):
        module = importlib.import_module(entry.module)
        programs = getattr(module, "PROGRAMS", None) or {"": module.PROGRAM}
        for program in programs.values():
            folded = [name for group in program.folded.values() for name in group]
            assert {*folded} <= {*program.values}, entry.name
            assert len(folded) == len({*folded}), entry.name


# --- Subjects without a command line ------------------------------------------------------------


def test_a_mesh():
    layout = MeshOptions(data=2, tensor=2, pipeline=2, schedule="gpipe", cut="3,4").layout()
    assert (layout.tensor, layout.pipeline, layout.cut) == (2, 2, (3, 4))
    assert layout.num_microbatches == 8
    with pytest.raises(UsageError, match=r"--schedule requires a pipeline\. .*--schedule=gpipe"):
        MeshOptions(schedule="gpipe").layout()
    with pytest.raises(UsageError, match=r"--data must be .*Received: --data=0"):
        MeshOptions(data=0).layout()
    with pytest.raises(UsageError, match=r"^--mesh_order=data,row is not supported: "):
        MeshOptions(mesh_order=("data", "row")).layout()


def test_checkpoints(tmp_path):
    CheckpointOptions().check(is_tpu=False)
    CheckpointOptions(workdir=str(tmp_path), save_every="60s", keep=3).check(is_tpu=False)
    with pytest.raises(UsageError, match=r"--keep requires --workdir\. Received: --keep=3 alone"):
        CheckpointOptions(keep=3).check(is_tpu=False)
    with pytest.raises(UsageError, match="--save_every must be a number of steps"):
        CheckpointOptions(save_every="often").check(is_tpu=False)
    with pytest.raises(UsageError, match="is not supported on a TPU"):
        CheckpointOptions(workdir=str(tmp_path)).check(is_tpu=True)


def test_local_steps():
    own = {"zero_stage": 0, "is_tpu": False, "has_servers": False, "divides_tables": False}
    LocalSGDOptions(sync_every=8, fragments=2).check("gpt", **own)
    with pytest.raises(UsageError, match="--fragments requires --sync_every"):
        LocalSGDOptions(fragments=2).check("gpt", **own)
    with pytest.raises(UsageError, match="multiple of --fragments"):
        LocalSGDOptions(sync_every=8, fragments=3).check("gpt", **own)
    with pytest.raises(UsageError, match=r"Received: --sync_every=8 --zero_stage=2"):
        LocalSGDOptions(sync_every=8).check("gpt", **{**own, "zero_stage": 2})


def test_a_monitor():
    assert MonitorOptions().callbacks() == []
    with pytest.raises(UsageError, match="--peak requires --monitor"):
        MonitorOptions(peak="1e9").check(is_in_step=True)


def test_an_optimizer():
    own, preset = OptimizerOptions(), PresetOptimizerOptions()
    assert (own.policy, own.planned("Adam")["dtype"]) == (None, "float32")
    assert preset.policy is PresetOptimizerOptions(dtype_policy="own").policy is None
    with pytest.raises(UsageError, match="--momentum requires --optimizer=sgd"):
        OptimizerOptions(momentum=0.9).check(is_tpu=False, has_sync=False)


def test_a_model_and_a_machine():
    assert ModelOptions(layers=2, width=64, heads=2).model().layers == 2
    with pytest.raises(UsageError, match=r"--width=100 --heads=3 is not supported"):
        ModelOptions(width=100, heads=3).model()
    with pytest.raises(UsageError, match="--layers cannot be combined with --preset"):
        ModelOptions(preset="llama3-8b", layers=2).model()
    assert MachineOptions(hosts=2, ranks=8).read()[1] == 8
    with pytest.raises(UsageError, match="--ranks must be a multiple of --hosts"):
        MachineOptions(hosts=3, ranks=8).read()


def test_the_home_folder_of_a_workdir(tmp_path, monkeypatch):
    """Shells leave `~` after `--workdir=`."""
    from tfdist.launch.flags.checkpoint import CheckpointOptions

    monkeypatch.setenv("HOME", str(tmp_path))
    given = CheckpointOptions(workdir="~/run")
    given.check(is_tpu=False)
    assert given.callbacks(8)[0].directory == str(tmp_path / "run")
    address = CheckpointOptions(workdir="gs://bucket/~/run")
    assert address.callbacks(8)[0].directory == "gs://bucket/~/run"
