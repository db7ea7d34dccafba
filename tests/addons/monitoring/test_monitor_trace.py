"""One trace of all ranks: clocks, messages, overlap; and the report that is made of it."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.addons.monitoring.monitor_programs import traced_fit
from tests.conftest import on_ranks
from tfdist.addons.monitoring.monitor.sections import Step, steps_of
from tfdist.addons.monitoring.monitor.trace import hidden_share, merged_trace, trace_of, write_trace
from tfdist.addons.monitoring.monitor.watch import Execution
from tfdist.addons.monitoring.run_report import UnreadableError, html_page, read_run, text_report
from tfdist.backend.clock.rows import Columns, Row
from tfdist.backend.clock.stamps import Column, Timed
from tfdist.mesh import Mesh

#: How far the clock of each rank is ahead of the one before, in seconds.
SKEW = 0.25


def slices_of(path) -> list[dict]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def check_clocks(path, num_ranks: int) -> None:
    """Nothing is over before it began elsewhere, by more than clocks may be apart."""
    tfdist = json.loads(path.read_text())["otherData"]["tfdist"]
    for rank, offset in enumerate(tfdist["offsets"]):
        assert offset == pytest.approx(-SKEW * rank, abs=1e-3)
    calls = collections.defaultdict(dict)
    for event in slices_of(path):
        if event["cat"] == "communication":
            # Groups of one axis have one name: stages sum up at the same time, each among its own.
            taking_part = event["name"], event["args"]["step"], *event["args"]["ranks"]
            calls[taking_part][event["pid"]] = event
    shared = {name: ranks for name, ranks in calls.items() if len(ranks) > 1}
    assert len(shared) >= 4
    for (name, _, *members), ranks in shared.items():
        assert ranks.keys() == set(members)
        begins = [event["ts"] for event in ranks.values()]
        ends = [event["ts"] + event["dur"] for event in ranks.values()]
        if name.startswith("all_reduce"):
            assert min(ends) > max(begins) - 1000, name


def check_messages(path) -> int:
    """No receive ends before its send began; returns how many arrows there are."""
    events = json.loads(path.read_text())["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        assert start["pid"] != ends[number]["pid"]
        assert ends[number]["ts"] >= start["ts"]
    return len(starts)


def check_lanes(path) -> None:
    """Slices of one lane follow each other, as Perfetto wants them."""
    lanes = collections.defaultdict(list)
    for event in slices_of(path):
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        spans.sort()
        assert all(a[1] <= b[0] + 0.5 for a, b in itertools.pairwise(spans))


@pytest.mark.slow  # It compares times, which a busy machine disturbs.
@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
def test_the_trace_of_a_pipeline(pool, tmp_path):
    path = tmp_path / "trace.json"
    pool.run(traced_fit, str(path), Mesh(pipeline=2), SKEW, timeout=250)
    assert check_messages(path) >= 4 * 4  # Two micro-batches, there and back, in four steps.
    check_lanes(path)
    check_clocks(path, 2)


@on_ranks(slow=[("horovod", 4)])
def test_the_trace_of_four_ranks(pool, tmp_path):
    path = tmp_path / "trace.json"
    pool.run(traced_fit, str(path), Mesh(pipeline=2, data=2), SKEW, timeout=280)
    assert check_messages(path) >= 2 * 4 * 4
    check_lanes(path)
    check_clocks(path, 4)
    assert len(read_run(path).rank_times()) == 4


@pytest.mark.slow  # It compares times, which a busy machine disturbs.
@on_ranks(("horovod", 2))
def test_overlap_and_report_of_a_data_parallel_training(pool, tmp_path):
    path = tmp_path / "trace.json"
    pool.run(traced_fit, str(path), None, SKEW, 256, timeout=250)
    check_lanes(path)
    check_clocks(path, 2)
    told = json.loads(path.read_text())["otherData"]["tfdist"]["hidden"]
    run = read_run(path)
    for times in run.rank_times():
        assert times.overlap == pytest.approx(told[times.rank], abs=0.03)
        assert sum(times.sections.values()) == pytest.approx(times.steps, rel=0.02)
    text = text_report(run)
    assert "rank 0" in text and "Slowest ranks first" in text
    page = html_page(run)
    for words in ("Timeline", "Overlap", "Slowest ranks", "forward backward", "rank 1"):
        assert words in page
    # Nothing is fetched, and nothing runs.
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script", page)


def crafted_step(begin: float, own: float, hidden: bool) -> Step:
    """A step that computes for `own` seconds, and sums for 0.04, half of that behind the computation."""
    start, ready = begin + 0.01, begin + 0.01 + own
    call = Column("call", "all_reduce/world/x.0", "ring", 800, (0, 1), in_background=hidden)
    row = Row(
        Columns(
            [
                Column("begin"),
                Column("start"),
                call,
                dataclasses.replace(call, kind="done"),
                Column("gradients"),
                Column("reduced"),
                Column("apply"),
                Column("updated"),
                Column("end"),
            ]
        ),
        np.array(
            [
                begin,
                start,
                ready - 0.02,
                ready + 0.02,
                ready,
                ready + 0.02,
                ready,
                ready + 0.03,
                ready + 0.03,
            ]
        ),
    )
    execution = Execution(begin, ready + 0.035, begin + 0.2, rows=[row])
    (step,) = steps_of(execution, [Timed("augment", begin + 0.15, begin + 0.16, True)])
    return step


@pytest.mark.parametrize("hidden", [True, False])
def test_sections_and_overlap_of_steps_that_are_known(tmp_path, hidden):
    step = crafted_step(100.0, 0.05, hidden)
    waits = 0.02 if hidden else 0.04
    expected = {
        "input": 0.01,
        "forward_backward": 0.05 if hidden else 0.03,
        "communication": waits,
        "optimizer": 0.01,
        "augment": 0.01,
        "other": 0.005,
    }
    expected["callbacks"] = 0.2 - sum(expected.values())
    for name, seconds in expected.items():
        assert step.seconds[name] == pytest.approx(seconds, abs=1e-6), name
    assert sum(step.seconds.values()) == pytest.approx(0.2)
    assert step.sent == 800  # Each of two ranks sends half of the array twice.
    assert step.communicating == pytest.approx(0.04, abs=1e-6)
    assert step.hidden == pytest.approx(0.02 if hidden else 0.0, abs=1e-6)
    traces = [trace_of([step], [], 5, offset, "host") for offset in (0.0, 3.0)]
    path = tmp_path / "trace.json"
    write_trace(str(path), merged_trace(traces))
    for times in read_run(path).rank_times():
        assert times.overlap == pytest.approx(hidden_share([step]), abs=0.03)
        assert times.overlap == pytest.approx(0.5 if hidden else 0.0, abs=1e-3)
        assert sum(times.sections.values()) == pytest.approx(times.steps, rel=0.02)


def test_a_stamp_of_an_earlier_step_does_not_count():
    step = crafted_step(100.0, 0.05, True)
    values = step.row.values.copy()
    values[2:4] -= 50.0  # A collective in a branch that was not taken.
    row = Row(step.row.columns, values)
    (found,) = steps_of(Execution(100.0, 100.1, 100.2, rows=[row]), [])
    assert found.calls == [] and found.hidden == 0
    assert sum(found.seconds.values()) == pytest.approx(0.2)


HOSTILE = "<script>alert(1)</script>"


def event(**changes) -> str:
    return json.dumps(
        {
            "traceEvents": [
                {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": HOSTILE}},
                {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": HOSTILE}},
                {"name": HOSTILE, "ph": "X", "pid": 0, "tid": 1, "ts": 0, "dur": 5} | changes,
            ]
        }
    )


def test_names_in_a_trace_are_no_html(tmp_path):
    path = tmp_path / f"{HOSTILE.replace('/', '')}.json"
    path.write_text(event())
    page = html_page(read_run(path))
    assert "<script" not in page and "&lt;script&gt;" in page


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"traceEvents": []}',
        '{"kind": "interval"}',
        "[" * 100_000,
        "\0",
        event(ts="x"),
        event(dur=None),
        event(ts=1e300),
        event(pid="a"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(UnreadableError):
        read_run(path)


def test_the_program_reports_a_folder_of_reports(tmp_path):
    lines = [
        {
            "kind": "interval",
            "step": step,
            "epoch": 0,
            "logs": {"loss": 1 / step, "samples_per_second": 100.0, "step_seconds": 0.1},
            "sections": {"input": 0.25, "forward_backward": 0.75},
        }
        for step in (10, 20, 30)
    ]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{")
    (tmp_path / "other.json").write_text('{"a": 1}')
    output = tmp_path / "page.html"
    command = [sys.executable, "-m", "tfdist.launch.report"]
    job = subprocess.run(
        [*command, str(tmp_path), f"--output={output}"], capture_output=True, text=True, timeout=120
    )
    assert job.returncode == 0, job.stderr
    assert "forward backward" in job.stdout and "75.0%" in job.stdout
    page = output.read_text()
    assert page.count("<polyline") == 3 and "Samples per second" in page
    job = subprocess.run(
        [*command, str(tmp_path / "none")], capture_output=True, text=True, timeout=120
    )
    assert job.returncode == 2 and len(job.stderr.splitlines()) == 1
