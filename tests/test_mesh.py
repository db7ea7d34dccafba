"""The mesh in pure Python: degrees, places, groups; and that asking for it costs nothing."""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist import Mesh
from tfdist.mesh import AXES, DEFAULT_ORDER, Axis

#: The axes that the shapes below give a degree.
SPREAD = ("data", "pipeline", "tensor")
COMBINATIONS = [
    names for length in range(len(SPREAD) + 1) for names in itertools.combinations(SPREAD, length)
]
#: Data, pipeline, tensor.
SHAPES = [(1, 1, 1), (4, 1, 1), (2, 2, 2), (3, 2, 4), (1, 5, 2), (2, 1, 3)]


def resolved(shape, rank=0, **options):
    data, pipeline, tensor = shape
    return Mesh(data=data, pipeline=pipeline, tensor=tensor, **options).resolve(
        data * pipeline * tensor, rank
    )


# Degrees.


def test_a_mesh_is_data_parallel_unless_told_otherwise():
    others = {"expert": 1, "context": 1, "pipeline": 1, "tensor": 1}
    assert Mesh().shape == {"data": -1, **others}
    assert Mesh().resolve(size=6, rank=0).shape == {"data": 6, **others}


@pytest.mark.parametrize("free", AXES)
def test_minus_one_takes_what_the_others_leave(free):
    degrees = {"data": 2, "expert": 5, "context": 2, "pipeline": 3, "tensor": 4}
    mesh = Mesh(**degrees | {free: -1}).resolve(size=240, rank=5)
    assert mesh.shape == degrees
    assert (mesh.size, mesh.rank) == (240, 5)


def test_resolving_leaves_the_mesh_as_it_was():
    mesh = Mesh(data=-1, tensor=2)
    first, second = mesh.resolve(size=4, rank=1), mesh.resolve(size=8, rank=7)
    assert not mesh.is_resolved
    assert mesh.shape["data"] == -1
    assert (first.shape["data"], second.shape["data"]) == (2, 4)
    # A resolved mesh may be resolved anew, for its own world only.
    assert first.resolve(size=4, rank=3).rank == 3
    with pytest.raises(ValueError, match="does not fill the world"):
        first.resolve(size=8, rank=0)


@pytest.mark.parametrize("degree", [0, -2, 1.0, "2", True, None])
@pytest.mark.parametrize("axis", AXES)
def test_a_degree_is_a_positive_integer_or_minus_one(axis, degree):
    with pytest.raises(
        ValueError, match=f"`{axis}` must be an int of at least 1, or -1.*{axis}={degree!r}"
    ):
        Mesh(**{axis: degree})


def test_only_one_axis_is_what_is_left():
    with pytest.raises(ValueError, match=r"At most one mesh axis.*data=-1, tensor=-1"):
        Mesh(tensor=-1)


@pytest.mark.parametrize(
    ("degrees", "size", "words"),
    [
        ({"data": 2, "tensor": 2}, 8, ["data 2 x tensor 2", "is 4 ranks", "8 were"]),
        ({"tensor": 3}, 8, ["tensor 3 requires", "the rest is data", "8 were", "6 or 9"]),
        ({"tensor": 2}, 3, ["a multiple of 2 ranks", "3 were started", "Start 2 or 4 ranks"]),
        ({"pipeline": 4}, 2, ["pipeline 4", "of 4 ranks", "2 were started", "Start 4 ranks"]),
    ],
    ids=["too-small", "does-not-divide", "odd", "too-large"],
)
def test_a_mesh_that_does_not_fill_the_world_names_every_degree(degrees, size, words):
    with pytest.raises(ValueError) as error:
        Mesh(**degrees).resolve(size=size, rank=0)
    for word in words:
        assert word in str(error.value)
    assert "-1" not in str(error.value)


@pytest.mark.parametrize(("size", "rank"), [(4, 4), (4, -1), (0, 0)])
def test_a_rank_lies_in_its_world(size, rank):
    wrong = (
        f"from 0 to {size - 1}. Received: rank={rank}" if size else "at least 1. Received: size=0"
    )
    with pytest.raises(ValueError, match=wrong):
        Mesh().resolve(size=size, rank=rank)


@pytest.mark.parametrize(
    "ask",
    [
        lambda mesh: mesh.rank,
        lambda mesh: mesh.size,
        lambda mesh: mesh.coordinates(),
        lambda mesh: mesh.group("data"),
        lambda mesh: mesh.groups("data"),
        lambda mesh: mesh.rank_at({"data": 0}),
    ],
    ids=["rank", "size", "coordinates", "group", "groups", "rank_at"],
)
def test_places_are_known_once_the_ranks_have_met(ask):
    with pytest.raises(RuntimeError, match=r"strategy\.mesh.*mesh\.resolve"):
        ask(Mesh(data=2))


# Places.


@pytest.mark.parametrize("order", list(itertools.permutations(SPREAD)), ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_coordinates_and_ranks_are_one_to_one(shape, order):
    mesh = resolved(shape, order=order)
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert [mesh.rank_at(place) for place in places] == list(range(mesh.size))
    assert len({tuple(place.values()) for place in places}) == mesh.size
    for place in places:
        assert list(place) == list(AXES)
        assert all(0 <= place[axis] < mesh.shape[axis] for axis in AXES)


def test_coordinates_are_those_of_this_rank_unless_asked_for_others():
    mesh = resolved((2, 2, 2), rank=6)
    place = {"data": 1, "expert": 0, "context": 0, "pipeline": 1, "tensor": 0}
    assert mesh.coordinates() == mesh.coordinates(6) == place
    assert mesh.rank_at({}) == 6
    assert mesh.rank_at({"data": 0}) == 4


def test_tensor_ranks_are_neighbours_and_stages_are_farthest_apart():
    mesh = resolved((2, 2, 2))
    assert mesh.order == DEFAULT_ORDER == ("pipeline", "data", "expert", "context", "tensor")
    assert [mesh.group(axis) for axis in ("tensor", "data", "pipeline")] == [(0, 1), (0, 2), (0, 4)]


def test_the_order_says_which_axis_is_slowest():
    mesh = resolved((2, 3, 1), order=("data", "tensor", "pipeline"))
    assert mesh.group("pipeline") == (0, 1, 2)
    assert mesh.group("data") == (0, 3)
    assert mesh.resolve(size=6, rank=4).order[-3:] == ("data", "tensor", "pipeline")


@pytest.mark.parametrize(
    "order", [("data",), ("data", "data", "tensor"), ("data", "tensor", "sequence"), ()]
)
def test_an_order_names_each_axis_once(order):
    with pytest.raises(ValueError, match="names each of") as error:
        Mesh(tensor=2, order=order)
    assert f"order={order!r}" in str(error.value)


@pytest.mark.parametrize("rank", [-1, 4])
def test_coordinates_of_a_rank_that_is_not_there(rank):
    with pytest.raises(ValueError, match=f"from 0 to 3.*rank={rank}"):
        resolved((4, 1, 1)).coordinates(rank)


def test_places_that_are_not_there():
    mesh = resolved((2, 1, 2))
    with pytest.raises(ValueError, match=r"`data` must be an int from 0 to 1.*data=2"):
        mesh.rank_at({"data": 2})
    for ask in (mesh.group, mesh.groups, lambda axis: mesh.rank_at({axis: 0})):
        with pytest.raises(ValueError, match="Received: 'sequence'"):
            ask("sequence")


# Groups.


@pytest.mark.parametrize("names", COMBINATIONS, ids=lambda names: "+".join(names) or "none")
@pytest.mark.parametrize("order", [DEFAULT_ORDER, AXES], ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_groups_divide_the_world(shape, order, names):
    mesh = resolved(shape, order=order)
    groups = mesh.groups(*names)
    # Each rank is in one group, and every group has the size of its axes.
    assert sorted(itertools.chain(*groups)) == list(range(mesh.size))
    size = 1
    for axis in names:
        size *= mesh.shape[axis]
    assert {len(group) for group in groups} == {size}
    assert groups == sorted(groups)
    for group in groups:
        # Members differ on the group's axes only, and each finds the same group.
        others = [axis for axis in AXES if axis not in names]
        assert len({tuple(mesh.coordinates(r)[axis] for axis in others) for r in group}) == 1
        assert {mesh.group(*names, rank=rank) for rank in group} == {group}
        assert list(group) == sorted(group)


def test_no_axis_is_the_rank_alone_and_all_axes_are_the_world():
    mesh = resolved((2, 2, 2), rank=5)
    assert mesh.group() == (5,)
    assert mesh.group(*AXES) == tuple(range(8))


def test_a_group_along_one_axis_is_in_the_order_of_its_coordinates():
    mesh = resolved((3, 2, 2), rank=7)
    for axis in AXES:
        places = [mesh.coordinates(rank)[axis] for rank in mesh.group(axis)]
        assert places == list(range(mesh.shape[axis]))


# What axes divide, and axes of a user's own.


def test_what_follows_from_axes_follows_from_what_they_divide():
    mesh = Mesh(data=2, axes={Axis("replica", "rows"): 2, Axis("ring", "weights"): -1})
    mesh = mesh.resolve(size=8, rank=5)
    assert mesh.row_axes == ("data", "expert", "replica")
    assert mesh.token_axes == ("context",)
    assert mesh.stage_axes == ("pipeline",)
    assert mesh.weight_axes == ("tensor", "ring")
    assert mesh.gradient_axes == ("data", "expert", "context", "replica")
    assert mesh.shape["ring"] == 2
    assert mesh.order[-3:] == ("replica", "ring", "tensor")
    assert mesh.group("ring") == (4, 5)
    assert mesh.group(*mesh.row_axes) == (1, 3, 5, 7)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"ring": 2}, "`axes` must be a dict from Axis to degree"),
        ({Axis("data", "rows"): 2}, "axes with names other than"),
        ({Axis("ring", "rows"): 2, Axis("ring", "weights"): 2}, "each once"),
        ({Axis("ring", "rows"): 0}, "`ring` must be an int of at least 1"),
        ([Axis("ring", "rows")], "`axes` must be a dict from Axis to degree"),
    ],
    ids=["a name", "of the mesh", "twice", "no rank", "a list"],
)
def test_own_axes_that_are_none(axes, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Mesh(axes=axes)


@pytest.mark.parametrize(("name", "divides"), [("a-b", "rows"), ("", "rows"), ("ring", "heads")])
def test_an_axis_that_is_none(name, divides):
    with pytest.raises(ValueError, match="Received"):
        Axis(name, divides)


# A value like any other.


def test_meshes_are_equal_where_degrees_order_and_rank_are():
    assert Mesh(data=2) == Mesh(data=2)
    assert resolved((2, 1, 2), rank=3) == resolved((2, 1, 2), rank=3)
    different = [
        Mesh(),
        Mesh(data=2),
        Mesh(data=2, tensor=2, order=AXES),
        Mesh(data=2, tensor=2, order=AXES[::-1]),
        Mesh(data=2, axes={Axis("ring", "weights"): 2}),
        Mesh(data=2, axes={Axis("ring", "rows"): 2}),
        resolved((2, 1, 1), rank=0),
        resolved((2, 1, 1), rank=1),
    ]
    assert len(set(different)) == len(different)
    assert hash(Mesh(data=2)) == hash(Mesh(data=2))
    assert Mesh() != "Mesh(data=-1)"
    # Where an axis of one rank stands makes no difference.
    assert Mesh(data=2, order=AXES) == Mesh(data=2)


def test_repr_says_the_degrees_and_the_rank():
    assert repr(Mesh(tensor=2)) == "Mesh(data=-1, tensor=2)"
    assert repr(resolved((2, 1, 2), rank=3)) == "Mesh(data=2, tensor=2, rank=3)"
    assert repr(Mesh(data=2, axes={Axis("ring", "rows"): 3})) == "Mesh(data=2, ring=3)"


def test_what_shape_returns_is_the_callers_own():
    mesh = Mesh(data=2)
    mesh.shape["data"] = 5
    assert mesh.shape["data"] == 2


# What an import brings along.

FLAGS_ADDED = """
import json, sys
{before}
from absl import flags, logging
defined = set(flags.FLAGS)
{statement}
print(json.dumps({{"modules": sorted(sys.modules), "flags": sorted(set(flags.FLAGS) - defined)}}))
"""


def imported(statement, before=""):
    """The modules and absl flags of a fresh process after a statement."""
    finished = subprocess.run(
        [sys.executable, "-c", FLAGS_ADDED.format(statement=statement, before=before)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    return {name.partition(".")[0] for name in found["modules"]}, found["flags"]


@pytest.mark.parametrize("statement", ["import tfdist", "from tfdist import Mesh; Mesh(data=2)"])
def test_the_mesh_is_pure_python(statement):
    modules, flags = imported(statement)
    assert "tfdist" in modules
    assert not modules & {"tensorflow", "keras", "numpy", "horovod", "tensorflow_datasets"}
    assert flags == []


def test_strategies_define_no_flag_and_leave_horovod_alone():
    modules, flags = imported("import tfdist.strategies", before="import tensorflow, keras")
    assert "tensorflow" in modules
    assert "horovod" not in modules
    assert flags == []


#: Where axes are named: they are what these define, or have a formula for each.
NAMING = ("tfdist/mesh.py", "tfdist/sharding/", "launch/flags/mesh.py", "tfdist/addons/planner/")


def lines_that_name_axes(code: str) -> list[int]:
    """The lines with a string that is the name of an axis, and nothing else."""
    strings = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant))
    return sorted({node.lineno for node in strings if node.value in AXES})


def test_axes_are_asked_for_by_their_meaning():
    root = Path(__file__).parents[1]
    rooms = ("tfdist", "strategies", "models", "launch")
    # Links in `tfdist/` lead to the others.
    files = sorted({path.resolve() for room in rooms for path in (root / room).rglob("*.py")})
    found = [
        f"{file}:{line}"
        for path in files
        if not (file := path.relative_to(root).as_posix()).startswith((*NAMING, "launch/bench/"))
        for line in lines_that_name_axes(path.read_text(encoding="utf-8"))
    ]
    # Words of messages, the name of a room, and keys of a checkpoint's state.
    assert len(found) <= 10, "Ask the mesh for `row_axes` and others:\n" + "\n".join(found)


def test_the_walk_finds_names_of_axes():
    code = '"""The data axis."""\nx = mesh.shape["data"], "of data"\n# "data"\ny = f(a="tensor")\n'
    assert lines_that_name_axes(code) == [2, 4]
