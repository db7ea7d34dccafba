"""`python -m benchmarks.training --against=COMMIT`: its statistics, its trees, its refusals, and a run of both trees."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from scipy.stats import binom

from benchmarks.against import Row, all_rows, header, interval_of_median
from benchmarks.commits import checkout, resolve, tree_of
from benchmarks.comparisons import COMPARISONS, ROWS, SIZES
from tfdist.launch.flags.command import UsageError

ROOT = Path(__file__).parents[2]
BENCH = (sys.executable, "-m", "benchmarks.training")

needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")


@pytest.mark.parametrize(
    ("count", "rank", "confidence"),
    # By tables of the sign test's interval.
    [(6, 1, 0.969), (9, 2, 0.961), (15, 4, 0.965), (20, 6, 0.959), (5, 1, 0.938), (1, 1, 0.0)],
)
def test_the_interval_is_that_of_order_statistics(count, rank, confidence):
    values = [1.0 + number / 100 for number in range(1, count + 1)]
    found = interval_of_median(values[::-1])
    assert (found.low, found.high) == (values[rank - 1], values[count - rank])
    assert found.confidence == pytest.approx(confidence, abs=5e-4)
    assert found.low <= statistics.median(values) <= found.high


@pytest.mark.parametrize("count", range(1, 60))
def test_the_interval_is_the_narrowest_with_95_percent(count):
    found = interval_of_median(range(1, count + 1))
    rank = int(found.low)
    assert found.high == count + 1 - rank
    assert found.confidence == pytest.approx(1 - 2 * binom.cdf(rank - 1, count, 0.5))
    assert found.confidence >= 0.95 or (rank == 1 and count < 6)
    narrower = 1 - 2 * binom.cdf(rank, count, 0.5)
    assert narrower < 0.95


def test_all_rows_are_the_geometric_mean_by_round():
    rows = [Row("a", [2.0, 1.0, 3.0], [1.0, 1.0, 4.0]), Row("b", [0.5, 4.0, 3.0], [1.0] * 3)]
    assert all_rows(rows).ratios == pytest.approx([1.0, 2.0, 3.0])
    assert all_rows(rows).processor == pytest.approx([1.0, 1.0, 2.0])
    assert all_rows(rows).line().split() == (
        ["geometric", "mean", "2.000", "[1.000,", "3.000]", "1.000", "[1.000,", "2.000]"]
    )
    assert "3 rounds, with intervals of 75.0%" in header(3)


def test_a_line_has_the_times_of_both_trees():
    line = Row("gpt-data", [0.5, 1.0], [0.9, 0.9], new=[0.1, 0.2], old=[0.2, 0.2]).line()
    assert line.split() == [
        *("gpt-data", "150.00", "ms", "200.00", "ms"),
        *("0.750", "[0.500,", "1.000]", "0.900", "[0.900,", "0.900]"),
    ]


def test_rows_are_each_job_of_tfdist_once():
    jobs = list(ROWS.values())
    assert all(jobs.count(job) == 1 for job in jobs)
    compared = [(each.model, each.ours) for each in COMPARISONS.values() if each.model != "dlrm"]
    assert all(pair in jobs for pair in compared)
    for model, job in jobs:
        assert job.environment is None and all(model in sizes for sizes in SIZES.values())


@needs_git
@pytest.mark.slow
def test_the_tree_of_a_commit_is_what_git_has(tmp_path):
    here = checkout()
    commit = resolve(here.folder, "HEAD")
    assert here.folder == ROOT and here.commit.startswith(commit[:12])
    tree = tree_of(here, commit, tmp_path)
    kept = subprocess.check_output(["git", "-C", ROOT, "show", f"{commit}:tfdist/mesh.py"])
    assert (tree.folder / "tfdist" / "mesh.py").read_bytes() == kept
    # Links are links, and what git does not keep is not there.
    assert (tree.folder / "tfdist" / "launch").is_symlink() and not (tree.folder / ".git").exists()
    assert tree.folder.is_relative_to(tmp_path) and tree.folder.name == commit
    made = tree.folder.stat().st_mtime_ns
    assert tree_of(here, commit, tmp_path) == tree and tree.folder.stat().st_mtime_ns == made


@needs_git
@pytest.mark.parametrize("name", ["no-such-commit", "--all", "HEAD:docs", "0" * 40])
def test_a_name_without_a_commit_is_refused(name):
    with pytest.raises(UsageError, match="must be a commit of"):
        resolve(ROOT, name)


@needs_git
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--against=no-such-commit"], "--against must be a commit"),
        (["--against=HEAD", "--only=gpt-ddp"], "--only with --against must be of mlp-data"),
        (["--against=HEAD", "--document=docs/performance.md"], "--document"),
        (["--against=HEAD", "--picture=a.png"], "--picture"),
    ],
)
def test_refusals(arguments, said):
    finished = subprocess.run(
        [*BENCH, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert finished.returncode == 2 and finished.stdout == ""
    assert said in finished.stderr and len(finished.stderr.splitlines()) == 1


@needs_git
@pytest.mark.slow
def test_both_trees_train(tmp_path):
    """A checkout whose perceptron has a layer more than its commit; its other models are the same."""
    new = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", ROOT, new], check=True, timeout=60)
    commit = subprocess.check_output(["git", "-C", new, "rev-parse", "HEAD"], text=True).strip()
    source = new / "models" / "mlp.py"
    flatten = 'x = keras.layers.Flatten(name="flatten")(x)'
    assert flatten in source.read_text()
    source.write_text(
        source.read_text().replace(flatten, f"{flatten}\n    x = keras.layers.Dense(3)(x)")
    )
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.training", "--against=HEAD"),
            *("--sizes=tiny", "--rounds=2", "--steps=2", "--timeout=120"),
            "--only=convnet-one-process,gpt-one-process,mlp-data",
            f"--json={tmp_path}/found.json",
        ],
        env={**os.environ, "PYTHONPATH": str(new)},
        cwd=new,
        capture_output=True,
        text=True,
        timeout=280,
    )
    old = new / ".peers" / "commits" / commit
    # That the perceptrons differ shows that each rank has imported its own tree.
    assert finished.returncode == 1, finished.stderr
    assert "mlp-data: The models must have the same size" in finished.stderr
    assert len(finished.stderr.splitlines()) == 1
    lines = finished.stdout.splitlines()
    assert lines[0] == f"new: {new}, {commit[:12]} with changes"
    assert lines[1] == f"old: {old}, {commit[:12]}"
    names = ["convnet-one-process", "gpt-one-process", "geometric"]
    assert [line.split()[0] for line in lines[4:]] == names
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["new"]["folder"] == str(new) and found["old"]["folder"] == str(old)
    *rows, together = found["rows"]
    for row in rows:
        assert len(row["new"]) == len(row["old"]) == 2 and min(row["new"] + row["old"]) > 0
        assert row["ratios"] == [a / b for a, b in zip(row["new"], row["old"], strict=True)]
        assert len(row["processor"]) == 2 and min(row["processor"]) > 0
        for ratios, summary in (("ratios", "ratio"), ("processor", "processor_ratio")):
            low, high = min(row[ratios]), max(row[ratios])
            assert row[summary] == {
                "median": pytest.approx((low + high) / 2),
                "low": low,
                "high": high,
                "confidence": 0.5,
            }
    assert together["ratios"] == pytest.approx(
        [
            statistics.geometric_mean(pair)
            for pair in zip(*(row["ratios"] for row in rows), strict=True)
        ]
    )
