"""`--strategy=tpu`: up to the border of a device that is not here, and what is said without one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.launch.train.test_train import BIN, last_word, run

#: Devices of the CPU under another strategy of TensorFlow stand for the cores of a TPU: what finds,
#: joins and starts the TPU is replaced, all else is what a TPU gets.
FAKE = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
called = []
class Resolver:
    def __init__(self, tpu):
        called.append(("resolve", tpu))
tf.distribute.cluster_resolver.TPUClusterResolver = Resolver
tf.config.experimental_connect_to_cluster = lambda r: called.append(("connect", type(r).__name__))
tf.tpu.experimental.initialize_tpu_system = lambda r: called.append(("initialize",))
cores = int(sys.argv.pop(1))
base = tf.distribute.MirroredStrategy if cores > 1 else tf.distribute.OneDeviceStrategy
class Strategy(base):
    def __init__(self, resolver):
        print(*called)
        super().__init__(["/CPU:0", "/CPU:1"] if cores > 1 else "/CPU:0")
tf.distribute.TPUStrategy = Strategy
import tfdist.runtime.versions
tfdist.runtime.versions.why_no_tpu = lambda version: ""
from tfdist.launch.train import main as train
sys.argv[1:] = ["--strategy=tpu", "--tpu=node-7", *sys.argv[1:]]
train.run()
"""


def test_without_a_tpu_one_line_says_so():
    job = run([os.path.join(BIN, "tfdist-train"), "--strategy=tpu", "--model=mlp", "--epochs=1"])
    assert job.returncode == 2, job.stderr
    (line,) = [line for line in job.stderr.splitlines() if line.startswith("tfdist-train: ")]
    assert "--strategy=tpu failed: TPU 'local' cannot be used: TensorFlow 2." in line
    assert "has no build for TPUs" in line and "use Keras on JAX" in line
    assert line.endswith("Omit --strategy to train without a TPU.")
    assert "Traceback" not in job.stderr and job.stdout == ""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--strategy=tpu", "--model=gpt", "--tensor=2"], "--strategy=tpu --tensor=2"),
        (["--strategy=tpu", "--zero_stage=1"], "--strategy=tpu --zero_stage=1"),
        (["--tpu=node-7"], "--tpu requires --strategy=tpu"),
    ],
)
def test_flags_that_a_tpu_cannot_follow_are_one_line(flags, words):
    job = run([os.path.join(BIN, "tfdist-train"), *flags])
    assert job.returncode == 2
    assert job.stderr.count("\n") == 1 and words in job.stderr, job.stderr


def fake(cores: int, *flags) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", FAKE, str(cores), *flags],
        capture_output=True,
        text=True,
        timeout=240,
    )


# Keras' loop of many steps does not run on two devices under MirroredStrategy.
@pytest.mark.slow
@pytest.mark.parametrize(("cores", "flags"), [(1, []), (2, ["--steps_per_execution=1"])])
def test_images_train_on_cores(cores, flags):
    job = fake(cores, "--model=mlp", "--epochs=12", "--batch_size=100", *flags)
    accuracy, where = last_word(job)
    assert where == f"{cores} core(s) of a TPU"
    assert "('resolve', 'node-7') ('connect', 'Resolver') ('initialize',)" in job.stdout
    # Batches of one size: 300 of the 360 test images fill three.
    assert "on 300 digits images" in job.stdout
    assert job.stderr.count("a TPU has not been tested on its device") == 1
    # An epoch has 14 batches of 100, fewer than the 32 steps of a call by default.
    assert f"{1 if flags else 14} steps per call of Keras" in job.stdout
    # In bfloat16.
    assert accuracy > 90


@pytest.mark.slow
def test_a_batch_that_the_cores_cannot_share_is_one_line():
    job = fake(2, "--model=mlp", "--batch_size=33")
    assert job.returncode == 2
    assert "2 cores of the TPU" in job.stderr.strip().splitlines()[-1]
