"""What the launcher shows of ranks: without TensorFlow's start-up, bars in one line, colours on terminals."""

from __future__ import annotations

import io
import re
import time

import pytest

from tfdist.launch.run import num_ranks
from tfdist.launch.run.output import RankOutput, is_noise

NOISE = [
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    b"I0000 00:00:1795599553.681962   16100 port.cc:153] oneDNN custom operations are on. You may",
    b"2026-11-25 10:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations",
    b"To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with "
    b"the appropriate compiler flags.",
    b"/job:worker/replica:0/task:1",
    b"E0000 00:00:1.2   3 util.cc:131] oneDNN supports DT_INT32 only on platforms with AVX-512. Falling back to the "
    b"default Eigen-based implementation if present.",
    b"E0000 00:00:1.2   3 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register",
]
NO_GPU = (
    b"E0000 00:00:1795602838.816855   25777 cuda_platform.cc:52] failed call to cuInit: INTERNAL"
)
SAID = [
    b"E0000 00:00:1795602838.816855   25777 allocator.cc:52] out of memory",
    b"W0000 00:00:1795602838.816855   25777 queue.cc:52] a queue is slow",
    b"2026-11-25 10:00:00.123456: E tensorflow/core/util/port.cc:153] broken",
    b"WARNING: the loss is not finite",
    b"/job:worker/replica:0/task:1 does not answer",
    b"Traceback (most recent call last):",
    b"I0000 is what the user's program prints",
    b"12/12 tests passed",
    b"",
]


def bar(step: int, of: int, rest: str) -> bytes:
    done = "━" * (20 * step // of)
    return f"\x1b[1m{step:2}/{of}\x1b[0m \x1b[32m{done}\x1b[0m\x1b[37m{'━' * (20 - len(done))}\x1b[0m {rest}".encode()


class Shown:
    def __init__(self, **options):
        self.text, self.now = b"", 0.0
        self.output = RankOutput(self._write, clock=lambda: self.now, **options)

    def _write(self, data: bytes) -> None:
        self.text += data


def test_noise_is_left_out_and_errors_stay():
    assert all(is_noise(line, has_gpu=True) for line in NOISE)
    assert not any(is_noise(line, has_gpu=False) for line in SAID)
    # Where there is a GPU, it is an error that CUDA does not find it.
    assert is_noise(NO_GPU, has_gpu=False) and not is_noise(NO_GPU, has_gpu=True)


def test_all_is_shown_on_demand(monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    shown = Shown(is_terminal=False)
    shown.output.print(b"0", NOISE[:2])
    assert shown.text.count(b"\n") == 2


def test_a_bar_in_a_file_is_a_line_in_the_end_and_now_and_then():
    shown = Shown(is_terminal=False)
    for step in range(1, 41):
        shown.now += 0.6
        shown.output.print(b"0", [bar(step, 40, f"1s 5ms/step - loss: {step}")])
    shown.output.print(b"0", [bar(40, 40, "3s 5ms/step - loss: 40 - val_loss: 2")])
    shown.output.print(b"0", [b"Epoch 2/2"])
    lines = shown.text.decode().splitlines()
    assert lines[-2:] == ["[0] 40/40 3s 5ms/step - loss: 40 - val_loss: 2", "[0] Epoch 2/2"]
    assert 3 <= len(lines) <= 5
    assert "\x1b" not in shown.text.decode()


def test_a_bar_on_a_terminal_is_drawn_over_itself_in_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = Shown(is_terminal=True)
    rest = "1s 5ms/step - accuracy: 0.9 - loss: 0.1 - top_5_accuracy: 0.99 - perplexity: 1.5"
    for step in range(1, 5):
        shown.output.print(b"10", [bar(step, 4, rest)])
    assert b"\n" not in shown.text
    drawn = re.split(r"\r\x1b\[K", shown.text.decode())
    assert len(drawn) == 4 and all(len(state) <= 79 for state in drawn), drawn
    shown.output.print(b"1", [b"\x1b[1mbold\x1b[0m"])
    shown.output.end(b"10")
    after = shown.text.decode().split("\r\x1b[K")[-1]
    # The other rank's line takes its place; in the end all of it is there.
    assert after == f"[1] \x1b[1mbold\x1b[0m\n[10] 4/4 {rest}\n"


def test_bars_of_several_ranks_and_of_tqdm():
    shown = Shown(is_terminal=False)
    shown.output.print(b"0", [b" 30%|###   | 3/10 [00:01<00:02, 3it/s]"])
    shown.output.print(b"1", [bar(1, 9, "1s 5ms/step")])
    assert shown.text == b""
    shown.output.end(b"1")
    shown.output.end(b"0")
    assert shown.text == b"[1] 1/9 1s 5ms/step\n[0]  30%|###   | 3/10 [00:01<00:02, 3it/s]\n"


def test_hostile_lines_are_quick():
    shown, begin = Shown(is_terminal=False), time.process_time()
    for line in (
        b"1/2 " + b"=" * 60_000,
        b" " * 60_000,
        b"\x1b[" * 20_000,
        b"1/2 " + b"= " * 30_000,
    ):
        shown.output.print(b"0", [line])
    shown.output.end(b"0")
    assert time.process_time() - begin < 2
    assert b"[0] 1/2 = = =" in shown.text


@pytest.mark.parametrize(
    ("devices", "variables", "words", "expected"),
    [
        (8, {}, [], 8),
        (8, {"CUDA_VISIBLE_DEVICES": "0,3"}, [], 2),
        (8, {"CUDA_VISIBLE_DEVICES": "0,-1,3"}, [], 1),
        (8, {"CUDA_VISIBLE_DEVICES": ""}, [], 12),
        (2, {"CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-2b,GPU-3c"}, [], 2),
        (0, {}, [], 12),
        (0, {"OMP_NUM_THREADS": "4"}, [], 3),
        (0, {"OMP_NUM_THREADS": "many"}, [], 12),
        (0, {"OMP_NUM_THREADS": "4"}, ["tfdist-train", "--threads=6"], 2),
        (0, {"TF_NUM_INTRAOP_THREADS": "100"}, [], 1),
    ],
)
def test_auto_starts_a_rank_for_each_gpu_or_else_for_each_core(
    monkeypatch, devices, variables, words, expected
):
    names = [f"/dev/nvidia{number}" for number in range(devices)]
    monkeypatch.setattr(num_ranks.glob, "glob", lambda _: names)
    monkeypatch.setattr(num_ranks, "count_cores", lambda: 12)
    assert num_ranks.ranks_of_this_machine(words, variables)[0] == expected


def test_a_containers_quota_of_cores_counts(tmp_path):
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert num_ranks.count_cores(tmp_path / "cpu.max") == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert num_ranks.count_cores(tmp_path / "cpu.max") == num_ranks.count_cores(tmp_path / "none")


def test_one_process_on_many_gpus_says_how_to_use_them(monkeypatch):
    from absl import logging

    from tfdist.strategies import auto as module

    said = io.StringIO()
    monkeypatch.setattr(logging, "warning", lambda text, *values: said.write(text % values))
    auto = __import__("sys").modules[module.__module__]
    for count, words in ((4, "tfdist-run -np auto -- python"), (1, "")):
        monkeypatch.setattr(auto.tf.config, "get_visible_devices", lambda _, n=count: ["gpu"] * n)
        said.truncate(0)
        auto._warn_of_idle_gpus()
        assert (words in said.getvalue()) and bool(said.getvalue()) == bool(words)
