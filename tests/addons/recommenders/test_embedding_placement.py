"""Where tables lie: chosen by size, and reported."""

from __future__ import annotations

import types

import numpy as np
import pytest

from tfdist.addons.recommenders import FeatureConfig, ShardedEmbedding, TableConfig
from tfdist.addons.recommenders.sharded_embedding.placement import place_tables, placement_report
from tfdist.collectives import Group


def group(size: int) -> Group:
    return Group(tuple(range(size)), "data", types.SimpleNamespace(rank=0))


def place(*tables: TableConfig, size: int = 4):
    return place_tables(tables, group(size))


def test_large_tables_are_cut_and_small_ones_are_dealt_out():
    large, wide = TableConfig("large", 10_000, 8), TableConfig("wide", 3, 50_000)
    small = [TableConfig(f"small {number}", 100 - number, 8) for number in range(6)]
    found = place(*small, large, wide)
    assert [each.kind for each in found] == ["table"] * 6 + ["rows", "columns"]
    # The largest first, each to the rank that holds least: what is cut lies on all alike.
    assert [each.owner for each in found[:6]] == [0, 1, 2, 3, 3, 2]


def test_what_is_asked_for_is_done():
    tables = [TableConfig(kind, 7, 5, placement=kind) for kind in ("rows", "columns", "table")]
    found = place(*tables)
    assert [each.kind for each in found] == ["rows", "columns", "table"]
    held = [
        [each.entries_of(rank, table) for rank in range(4)]
        for table, each in zip(tables, found, strict=True)
    ]
    # Two of seven rows, two of five columns, or all.
    assert held == [[10] * 4, [14] * 4, [35, 0, 0, 0]]


def test_the_report_says_where_and_how_much():
    tables = [TableConfig("users", 1 << 20, 4), TableConfig("words", 1 << 10, 4)]
    report = placement_report(tables, place(*tables, size=2), group(2), 4)
    assert "rows, all ranks" in report and "whole, rank 0" in report
    assert report.endswith("MiB by rank: 8.016, 8.000"), report


@pytest.mark.parametrize(("names", "tables"), [(("a", "a"), ("x", "y")), (("a", "b"), ("x", "x"))])
def test_names_are_there_once(names, tables):
    features = [
        FeatureConfig(name, TableConfig(table, 4, 2))
        for name, table in zip(names, tables, strict=True)
    ]
    with pytest.raises(ValueError, match="must have different names"):
        ShardedEmbedding(features)


def test_inputs_are_called_by_the_names_of_features():
    layer = ShardedEmbedding([FeatureConfig("user", TableConfig("users", 4, 2))], name="tables")
    with pytest.raises(ValueError, match=r"`inputs` of `tables` must be a dict .* Received: "):
        layer({"item": np.array([1])})
