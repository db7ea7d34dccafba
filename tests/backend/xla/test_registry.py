"""What TensorFlow's registry says of XLA: operations with a kernel, and inputs that must be constant."""

from __future__ import annotations

import pytest

from tfdist.backend.xla.registry import compiled_operations


def test_operations_are_those_that_xla_compiles():
    found = compiled_operations()
    assert len(found) > 400
    for name in ("MatMul", "ReadVariableOp", "AssignVariableOp", "If", "While", "ResourceGather"):
        assert name in found, f"TensorFlow's registry does not list {name} any more."
    for name in ("EagerPyFunc", "LookupTableFindV2", "Timestamp", "HorovodAllreduce"):
        assert name not in found


@pytest.mark.parametrize(
    ("name", "constant"),
    [
        ("Reshape", {"shape"}),
        ("Fill", {"dims"}),
        ("Pad", {"paddings"}),
        ("Tile", {"multiples"}),
        ("Transpose", {"perm"}),
        ("Sum", {"reduction_indices"}),
        ("ConcatV2", {"axis"}),
        ("StridedSlice", {"begin", "end", "strides"}),
        ("Slice", {"begin", "size"}),
        ("SplitV", {"size_splits", "split_dim"}),
        ("UnsortedSegmentSum", {"num_segments"}),
        ("Range", {"start", "limit", "delta"}),
        ("OneHot", {"depth"}),
        ("AddV2", set()),
        ("Equal", set()),
        ("If", set()),
        ("MatMul", set()),
        ("ResourceGather", set()),
        ("InvertPermutation", set()),
    ],
)
def test_constant_inputs(name, constant):
    assert compiled_operations()[name] == constant
