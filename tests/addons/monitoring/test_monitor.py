"""The Monitor: its sections are where the time goes, and its counts are those by hand."""

from __future__ import annotations

import json
import urllib.request

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.addons.monitoring.monitor_programs import (
    Begins,
    dense,
    fit_gpt,
    hand_count_of_gpt,
    of_epoch,
    sleepy_fit,
)
from tests.conftest import on_ranks
from tfdist import models
from tfdist.addons.monitoring import timer
from tfdist.addons.monitoring.intervals import common, union
from tfdist.addons.monitoring.monitor.sections import without
from tfdist.callbacks import Monitor
from tfdist.mesh import Mesh

BOTH = (("horovod", 2), ("tensorflow", 2))


def fit(model, steps=40, rows=16, callbacks=(), **options):
    x = np.random.default_rng(0).random((steps * rows, *model.input_shape[1:]), "float32")
    monitor = Monitor(16, show=False, **options)
    history = model.fit(
        x, np.ones(len(x), "int32"), batch_size=rows, verbose=0, callbacks=[*callbacks, monitor]
    )
    return monitor, history


def flops(monitor) -> float:
    logs = of_epoch(monitor).logs
    return logs["model_flops_per_second"] * logs["step_seconds"]


@pytest.mark.slow  # It compares times, which a busy machine disturbs.
def test_sections_add_up_to_the_step_that_another_callback_sees():
    begins = Begins()
    monitor, history = fit(dense(512), callbacks=[begins])
    report = of_epoch(monitor)
    assert sum(report.sections.values()) == pytest.approx(1, abs=1e-6)
    assert report.logs["step_seconds"] == pytest.approx(begins.mean(), rel=0.02)
    assert report.sections["optimizer"] > 0
    assert history.history["samples_per_second"][0] == pytest.approx(
        16 / report.logs["step_seconds"], rel=1e-6
    )


@pytest.mark.slow  # It compares times, which a busy machine disturbs.
@pytest.mark.parametrize("where", ["input", "callbacks", "augment"])
def test_a_sleep_is_found_in_its_section(where):
    report = sleepy_fit(where, 0.02, dense(32))
    seconds = report.sections[where] * report.logs["step_seconds"]
    # A generator sleeps in part while a step runs; a busy machine wakes a sleeper late.
    assert (0.01 if where == "input" else 0.0199) < seconds < 0.04
    assert sum(report.sections.values()) == pytest.approx(1, abs=1e-6)


def test_operations_of_an_mlp_are_those_by_hand():
    width, rows = 256, 16
    monitor, _ = fit(dense(width), rows=rows)
    products = 2 * rows * (2 * width * width + width * 10)
    # The data need no gradient.
    assert flops(monitor) == pytest.approx(3 * products - 2 * rows * width * width, rel=1e-9)


def test_operations_of_the_convnet_are_those_by_hand():
    model = models.convnet((8, 8, 1), 10, filters=(4, 8), width=16, dropout=0.0)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows = 8
    monitor, _ = fit(model, rows=rows)
    first = 2 * rows * 64 * 9 * 1 * 4
    products = first + 2 * rows * (64 * 9 * 4 * 4 + 16 * 9 * (4 * 8 + 8 * 8) + 2 * 2 * 8 * 16 + 160)
    assert flops(monitor) == pytest.approx(3 * products - first, rel=1e-9)


def test_what_recompute_makes_again_is_no_work_of_the_model():
    from tfdist.recompute import recompute
    from tfdist.strategies import LocalStrategy

    counts = []
    for again in (False, True):
        with LocalStrategy().scope():
            model = dense(64, "gelu")  # Its gradient takes what it was applied to.
            if again:
                recompute(model, "every_layer")
            model.compile("sgd", "sparse_categorical_crossentropy")
        monitor, _ = fit(model, peak=1e9)
        counts.append((flops(monitor), of_epoch(monitor).logs))
    assert counts[0][0] == pytest.approx(counts[1][0], rel=1e-9)
    assert counts[0][1]["hfu"] == pytest.approx(counts[0][1]["mfu"], rel=1e-9)
    # The first two of three products again; the model's are three times all, without the gradient of
    # the input.
    product = 2 * 16 * 64 * 64
    model_flops = 3 * (2 * product + 2 * 16 * 64 * 10) - product
    assert counts[1][0] == pytest.approx(model_flops, rel=1e-9)
    again = 1 + 2 * product / model_flops
    assert counts[1][1]["hfu"] == pytest.approx(again * counts[1][1]["mfu"], rel=1e-9)


def test_a_loop_and_unknown_sizes_are_counted_by_what_runs():
    inputs = keras.Input((None, 4))
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.ones([3, 5, 4]), tf.ones([3, 5, 2]))).repeat(20)
    data = data.map(lambda x, y: (tf.ensure_shape(x, [None, None, 4]), y))
    monitor = Monitor(16, show=False)
    model.fit(data, verbose=0, callbacks=[monitor])
    assert flops(monitor) == pytest.approx(2 * 2 * 15 * 4 * 2)


@pytest.mark.slow  # It compares times, which a busy machine disturbs.
def test_the_norm_is_that_of_the_gradients():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.ones((320, 4), "float32")
    monitor = Monitor(16, show=False)
    model.fit(x, np.zeros((320, 1)), batch_size=8, verbose=0, callbacks=[monitor])
    norm = 2 * abs(float(model.weights[0].numpy().sum())) * 2  # d/dw of (sum w)^2, four times.
    assert of_epoch(monitor).logs["gradient_norm"] == pytest.approx(norm, rel=1e-4)


def test_the_model_is_as_before_when_fit_is_over():
    model = dense(16)
    fit(model)
    before = model.train_function
    fit(model)
    assert model.train_function is before
    assert "train_step" not in vars(model) and "apply" not in vars(model.optimizer)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fit(model, callbacks=[Stop()])
    fit(model)
    assert "apply" not in vars(model.optimizer) and model.train_function is before


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 4}])
def test_other_ways_to_run_steps(options):
    begins = Begins()
    monitor, _ = fit(dense(64, **options), steps=40, callbacks=[begins])
    report = of_epoch(monitor)
    assert report.step == 40
    assert sum(report.sections.values()) == pytest.approx(1, abs=1e-6)
    assert report.sections["forward_backward"] > 0 and report.sections["optimizer"] > 0


def test_a_gpu_is_said_to_be_untested(monkeypatch, caplog):
    from tfdist.utils import untested

    untested.say_untested.cache_clear()
    model = dense(10)
    devices = tf.config.list_physical_devices
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: [gpu] if kind == "GPU" else devices()
    )
    for _ in range(2):
        fit(model, steps=2, rows=4)
    assert caplog.text.count("the Monitor (sections of a step and memory on GPUs)") == 1


def test_a_timer_without_a_monitor_does_nothing():
    with timer("augment"):
        pass
    with pytest.raises(ValueError, match="name"):
        timer("")


def test_reports_go_to_json_tensorboard_and_prometheus(tmp_path, capsys):
    class Ask(keras.callbacks.Callback):
        text = ""

        def on_epoch_end(self, epoch, logs=None):
            url = f"http://127.0.0.1:{monitor.prometheus_port}/metrics"
            self.text = urllib.request.urlopen(url, timeout=5).read().decode()

    monitor = Monitor(
        16, json=tmp_path / "run.jsonl", tensorboard=tmp_path / "board", prometheus_port=0, peak=1e9
    )
    model, ask = dense(16), Ask()
    x = np.ones((640, 16), "float32")
    model.fit(
        x, np.ones(640, "int32"), batch_size=16, epochs=2, verbose=0, callbacks=[monitor, ask]
    )
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds[0] == "begin" and kinds.count("epoch") == 2 and kinds.count("interval") >= 3
    assert lines[-1]["logs"]["mfu"] > 0 and lines[-1]["logs"]["eta_seconds"] == 0
    assert "tfdist_mfu " in ask.text and 'tfdist_section_share{section="input"}' in ask.text
    for line in ask.text.splitlines():
        assert line.startswith("# TYPE ") or float(line.rpartition(" ")[2]) >= 0
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{monitor.prometheus_port}/metrics", timeout=5)
    events = list((tmp_path / "board").glob("events*"))
    tags = {
        value.tag
        for event in tf.compat.v1.train.summary_iterator(str(events[0]))
        for value in event.summary.value
    }
    assert {"monitor/samples_per_second", "monitor/section/input"} <= tags
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == kinds.count("interval") and "samples/s" in printed[0]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"flops": -1}', '{"flops": "1"}', "[" * 10**5])
def test_a_file_that_is_no_peak_is_refused(tmp_path, text):
    path = tmp_path / "peak.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="tfdist-bench peak"):
        Monitor(peak=path)


def test_unions_of_intervals():
    one = union([(0, 2), (1, 3), (5, 6), (6, 6)])
    assert one == [(0, 3), (5, 6)]
    assert common(one, [(2, 5.5)]) == [(2, 3), (5, 5.5)]
    assert without(one, [(1, 2), (5, 7)]) == [(0, 1), (2, 3)]


@pytest.mark.slow  # It compares times, which a busy machine disturbs.
@on_ranks(*BOTH)
def test_ranks_report_the_same_and_count_as_one(pool):
    rows = 8
    found = pool.run(fit_gpt, rows=rows, timeout=200)
    assert found[0]["logs"] == found[1]["logs"]
    assert found[0]["flops"] == pytest.approx(hand_count_of_gpt(rows), rel=1e-9)
    assert found[0]["tokens"] == pytest.approx(rows * 32, rel=1e-9)
    assert sum(found[0]["sections"].values()) == pytest.approx(1, abs=1e-6)
    assert found[0]["sections"]["communication"] > 0
    mean = sum(each["begins"] for each in found) / 2
    assert found[0]["step"] == pytest.approx(mean, rel=0.02)


@pytest.mark.slow  # It compares times, which a busy machine disturbs.
@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
def test_a_tensor_group_counts_once(pool):
    rows = 8
    found = pool.run(fit_gpt, Mesh(tensor=2), rows=rows, timeout=200)
    assert found[0]["tokens"] == pytest.approx(rows * 32, rel=1e-9)
    assert found[0]["flops"] == pytest.approx(hand_count_of_gpt(rows), rel=1e-9)
