"""The digits: scikit-learn's images, in two splits that are alike, also if many prepare them."""

import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits

from tfdist.addons.datasets import preparing
from tfdist.addons.datasets.digits import Digits

NUM_PROCESSES = 3


def read(builder, split):
    """All images, shape (n, 8, 8, 1), and labels of a split, in its order."""
    dataset = builder.as_dataset(split=split, as_supervised=True, batch_size=2000)
    images, labels = next(dataset.as_numpy_iterator())
    return images, labels


def keys(images, labels):
    return [(label, image.tobytes()) for image, label in zip(images, labels, strict=True)]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    Digits(data_dir=folder).download_and_prepare()
    return folder


@pytest.fixture(scope="module")
def splits(data_dir):
    builder = Digits(data_dir=data_dir)
    return {split: read(builder, split) for split in ("train", "test")}


def test_sizes_and_types(splits):
    assert {name: images.shape for name, (images, _) in splits.items()} == {
        "train": (1437, 8, 8, 1),
        "test": (360, 8, 8, 1),
    }
    for images, labels in splits.values():
        assert images.dtype == np.uint8
        assert labels.dtype == np.int64
        assert images.max() == 16


def test_splits_together_are_what_scikit_learn_carries(splits):
    ours = keys(*splits["train"]) + keys(*splits["test"])
    digits = load_digits()
    theirs = keys(digits.images.astype(np.uint8), digits.target)
    assert sorted(ours) == sorted(theirs)


def test_splits_share_no_image(splits):
    assert set(keys(*splits["train"])).isdisjoint(keys(*splits["test"]))


def test_each_class_is_split_alike(splits):
    counts = {name: np.bincount(labels, minlength=10) for name, (_, labels) in splits.items()}
    share = counts["test"] / (counts["train"] + counts["test"])
    np.testing.assert_allclose(share, 0.2, atol=0.005)


def test_each_writer_is_split_alike(splits):
    # The file holds about 138 images of each of 13 writers, one writer after the other.
    digits = load_digits()
    place = {key: i for i, key in enumerate(keys(digits.images.astype(np.uint8), digits.target))}
    test_places = [place[key] for key in keys(*splits["test"])]
    blocks, _ = np.histogram(test_places, bins=13, range=(0, 1797))
    assert blocks.min() >= 0.7 * 360 / 13


def test_order_on_disk_mixes_classes_and_is_fixed(splits, tmp_path):
    images, labels = splits["train"]
    assert len(set(labels[:50])) == 10
    Digits(data_dir=tmp_path).download_and_prepare()
    again, _ = read(Digits(data_dir=tmp_path), "train")
    np.testing.assert_array_equal(again, images)


def test_tfds_finds_it_by_name(data_dir):
    dataset, info = tfds.load("digits", split="test", data_dir=data_dir, with_info=True)
    assert info.full_name == "digits/1.0.0"
    assert info.metadata["max_value"] == 16
    assert len(dataset) == 360


def test_builder_made_before_the_data_was_there_knows_it_afterwards(data_dir, tmp_path):
    builder = Digits(data_dir=tmp_path)
    shutil.copytree(data_dir / "digits", tmp_path / "digits")
    builder.download_and_prepare()
    assert builder.info.splits["train"].num_examples == 1437
    assert len(read(builder, "test")[1]) == 360


def test_host_that_no_lock_reaches_may_be_faster(data_dir, tmp_path, monkeypatch):
    generate = Digits._generate_examples

    def no_locks(*_):
        raise OSError("no locks here")

    def generate_late(self, *args):
        shutil.copytree(data_dir / "digits", tmp_path / "digits", dirs_exist_ok=True)
        return generate(self, *args)

    monkeypatch.setattr(Digits, "_generate_examples", generate_late)
    monkeypatch.setattr(preparing, "_lock_file", no_locks)
    builder = Digits(data_dir=tmp_path)
    builder.download_and_prepare()
    assert len(read(builder, "train")[1]) == 1437


PREPARE = """
import json, os, random, sys, time
from pathlib import Path

import tfdist.data

lazy = "tensorflow_datasets" not in sys.modules
from tfdist.addons.datasets.digits import Digits

folder, rank = Path(sys.argv[1]), sys.argv[2]
write = Digits._split_generators

def write_and_tell(self, dl_manager):
    (folder / f"written-by-{rank}").touch()
    return write(self, dl_manager)

Digits._split_generators = write_and_tell
builder = Digits(data_dir=folder / "data")
(folder / f"ready-{rank}").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
random.seed(7)  # As Keras' set_random_seed does on all ranks.
builder.download_and_prepare()
print(json.dumps({
    "lazy": lazy,
    "draw": random.random(),
    "counts": [builder.info.splits[split].num_examples for split in ("train", "test")],
    "labels": [int(label) for _, label in builder.as_dataset(split="test", as_supervised=True)],
}))
"""


@pytest.mark.slow
def test_processes_that_prepare_at_once(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PREPARE, str(tmp_path), str(rank)],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_PROCESSES)
    ]
    try:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("ready-*"))) < NUM_PROCESSES and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.02)
        (tmp_path / "go").touch()
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
        # A progress bar in a log is a line for each of its states.
        assert "examples/s" not in errors
        assert "splits/s" not in errors
    # Nor does TFDS speak of a download that there is not.
    results = [json.loads(output) for output, _ in outputs]
    assert all(result == results[0] for result in results)
    assert results[0]["counts"] == [1437, 360]
    assert len(results[0]["labels"]) == 360
    assert results[0]["lazy"]
    assert len(list(tmp_path.glob("written-by-*"))) == 1
    # No half-written folder is left.
    assert [path.name for path in (tmp_path / "data" / "digits").iterdir()] == ["1.0.0"]
