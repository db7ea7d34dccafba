"""Loading by name, and shares of a split for the ranks of the data axis."""

import gzip
import itertools
import random
import struct
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download import downloader
from tensorflow_datasets.image_classification import mnist

from tfdist.addons.datasets import load, load_for_rank, preparing
from tfdist.addons.datasets.digits import Digits
from tfdist.addons.datasets.loading import rank_split, read_config
from tfdist.data.sharding import is_per_rank
from tfdist.mesh import Mesh

NUM_FILES = 4
MNIST_SIZES = {"train": 45, "test": 12}


def read(dataset):
    """All images and labels, in order."""
    batches = list(dataset.batch(2000).as_numpy_iterator())
    if not batches:
        return np.zeros((0,)), np.zeros((0,), np.int64)
    ((images, labels),) = batches
    return images, labels


def keys(dataset):
    images, labels = read(dataset)
    return [(label, image.tobytes()) for image, label in zip(images, labels, strict=True)]


def joined(shares):
    return list(itertools.chain.from_iterable(shares))


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    Digits(data_dir=folder).download_and_prepare()
    return folder


@pytest.fixture(scope="session")
def many_files(tmp_path_factory):
    """The digits in several files per split."""
    folder = tmp_path_factory.mktemp("many")
    config = tfds.download.DownloadConfig(num_shards=NUM_FILES)
    Digits(data_dir=folder).download_and_prepare(download_config=config)
    return folder


@pytest.fixture(scope="session")
def mnist_images():
    """Random images and labels in MNIST's shapes, by split."""
    rng = np.random.default_rng(0)
    return {
        split: (rng.integers(0, 256, (size, 28, 28, 1), np.uint8), np.arange(size) % 10)
        for split, size in MNIST_SIZES.items()
    }


def write_idx(path, array):
    """Writes an array of bytes in the format of MNIST's files."""
    with gzip.open(path, "wb") as file:
        file.write(struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape))
        file.write(array.astype(np.uint8).tobytes())


@pytest.fixture(scope="session")
def mnist_dir(tmp_path_factory, mnist_images):
    """A data_dir in which TFDS' own MNIST builder has prepared a small MNIST from IDX files."""
    source = tmp_path_factory.mktemp("mnist-source")
    for split, prefix in {"train": "train", "test": "t10k"}.items():
        images, labels = mnist_images[split]
        write_idx(source / f"{prefix}-images-idx3-ubyte.gz", images[..., 0])
        write_idx(source / f"{prefix}-labels-idx1-ubyte.gz", labels)
    folder = tmp_path_factory.mktemp("mnist")
    with pytest.MonkeyPatch.context() as patch:
        # TFDS copies what is no http address, and extracts and parses it as it would MNIST.
        patch.setattr(mnist.MNIST, "URL", f"{source}/")
        patch.setattr(mnist, "_TRAIN_EXAMPLES", MNIST_SIZES["train"])
        patch.setattr(mnist, "_TEST_EXAMPLES", MNIST_SIZES["test"])
        load("mnist", "train", data_dir=folder)
    return folder


def test_digits_are_scaled_to_one(data_dir):
    dataset, info = load("digits", "train", data_dir=data_dir)
    assert dataset.element_spec == (
        tf.TensorSpec((8, 8, 1), tf.float32),
        tf.TensorSpec((), tf.int64),
    )
    assert len(dataset) == info.splits["train"].num_examples == 1437
    images, _ = read(dataset)
    raw = Digits(data_dir=data_dir).as_dataset(split="train", batch_size=2000)
    np.testing.assert_array_equal(images * 16, next(raw.as_numpy_iterator())["image"])
    assert images.max() == 1.0


def test_digits_read_from_files_alone_are_scaled_alike(data_dir):
    # A name with a version makes TFDS read the files without the builder's code.
    assert keys(load("digits:1.0.0", "test", data_dir=data_dir)[0]) == keys(
        load("digits", "test", data_dir=data_dir)[0]
    )


def test_load_prepares_what_is_not_there(tmp_path):
    random.seed(3)
    dataset, info = load("digits", "test", data_dir=tmp_path / "new")
    assert len(dataset) == 360
    assert info.splits["train"].num_examples == 1437
    # Layers made after this draw their seeds as on the ranks that found the data ready.
    assert random.random() == random.Random(3).random()


def test_mnist_through_tfds(mnist_dir, mnist_images):
    for split, (images, labels) in mnist_images.items():
        dataset, info = load("mnist", split, data_dir=mnist_dir, download=False)
        assert info.full_name == "mnist/3.0.1"
        expected = tf.data.Dataset.from_tensor_slices(((images / 255).astype(np.float32), labels))
        ours, theirs = read(dataset), read(expected)
        order, expected_order = (np.lexsort(i.reshape(len(i), -1).T) for i in (ours[0], theirs[0]))
        np.testing.assert_allclose(ours[0][order], theirs[0][expected_order], atol=1e-6)
        np.testing.assert_array_equal(ours[1][order], theirs[1][expected_order])


def test_mnist_for_ranks(mnist_dir):
    shares = [
        keys(load("mnist", rank_split("train", 4, index), data_dir=mnist_dir)[0])
        for index in range(4)
    ]
    assert [len(share) for share in shares] == [12, 11, 11, 11]
    assert joined(shares) == keys(load("mnist", "train", data_dir=mnist_dir)[0])


@pytest.mark.parametrize(
    "split, size, num_shards",
    [("test[:53]", 53, n) for n in (1, 2, 3, 4, 5)] + [("test", 360, 4)],
)
def test_shares_are_even_and_complete(data_dir, split, size, num_shards):
    shares = [
        keys(load("digits", rank_split(split, num_shards, index), data_dir=data_dir)[0])
        for index in range(num_shards)
    ]
    sizes = [len(share) for share in shares]
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1
    assert joined(shares) == keys(load("digits", split, data_dir=data_dir)[0])


def test_drop_remainder_makes_equal_shares(data_dir):
    sizes = [
        len(load("digits", rank_split("test", 7, i, drop_remainder=True), data_dir=data_dir)[0])
        for i in range(7)
    ]
    assert sizes == [51] * 7


def test_shares_of_files_are_complete(many_files):
    shares = [
        keys(load("digits", rank_split("train", 3, index), data_dir=many_files)[0])
        for index in range(3)
    ]
    assert [len(share) for share in shares] == [479] * 3
    assert sorted(joined(shares)) == sorted(keys(load("digits", "train", data_dir=many_files)[0]))


def test_more_ranks_than_examples(data_dir):
    datasets = [
        load("digits", rank_split("test[:2]", 3, i), data_dir=data_dir)[0] for i in range(3)
    ]
    assert [len(dataset) for dataset in datasets] == [1, 1, 0]
    assert datasets[2].element_spec == datasets[0].element_spec


def test_a_seed_fixes_the_order(many_files):
    def epochs(seed):
        dataset, _ = load("digits", "test", data_dir=many_files, read_config=read_config(seed))
        return [keys(dataset), keys(dataset)]

    first, second = epochs(5)
    assert epochs(5) == [first, second]
    assert first != second
    assert sorted(first) == sorted(second)
    # Of a few files, two seeds may give the same order.
    assert any(epochs(seed)[0] != first for seed in range(6, 10))
    assert epochs(None)[0] == epochs(None)[1]


def test_input_context_divides_the_files(many_files):
    shares = []
    for pipeline in range(2):
        context = tf.distribute.InputContext(num_input_pipelines=2, input_pipeline_id=pipeline)
        config = read_config(seed=1, input_context=context)
        shares.append(keys(load("digits", "test", data_dir=many_files, read_config=config)[0]))
    whole = keys(load("digits", "test", data_dir=many_files)[0])
    assert sorted(joined(shares)) == sorted(whole)
    assert all(shares)


def test_input_context_needs_as_many_files(data_dir):
    context = tf.distribute.InputContext(num_input_pipelines=2)
    with pytest.raises(ValueError, match=r"'digits'.*num_shards=1"):
        load("digits", "test", data_dir=data_dir, read_config=read_config(input_context=context))


def test_ranks_read_by_their_place_on_the_data_axis(data_dir):
    shares = {}
    for rank in (0, 1, 3, 6, 7):
        mesh = Mesh(data=2, pipeline=2, tensor=2).resolve(size=8, rank=rank)
        dataset, info = load_for_rank(
            "digits", "test", SimpleNamespace(mesh=mesh), data_dir=data_dir
        )
        assert info.name == "digits"
        shares.setdefault(mesh.coordinates()["data"], []).append(keys(dataset))
    assert all(share == group[0] for group in shares.values() for share in group)
    assert shares[0][0] + shares[1][0] == keys(load("digits", "test", data_dir=data_dir)[0])


def test_share_says_that_it_is_divided_already(data_dir):
    strategy = SimpleNamespace(mesh=Mesh(data=2).resolve(size=2, rank=1))
    dataset, _ = load_for_rank("digits", "test", strategy, data_dir=data_dir)
    assert is_per_rank(dataset.shuffle(100, seed=1).map(lambda *pair: pair).batch(8).prefetch(1))
    assert not is_per_rank(load("digits", "test", data_dir=data_dir)[0].batch(8))


def test_ranks_take_equally_many_steps_unless_told_otherwise(data_dir):
    def sizes(**kwargs):
        return [
            len(load_for_rank("digits", "test[:7]", strategy, data_dir=data_dir, **kwargs)[0])
            for strategy in strategies
        ]

    meshes = [Mesh().resolve(size=3, rank=rank) for rank in range(3)]
    strategies = [SimpleNamespace(mesh=mesh) for mesh in meshes]
    assert sizes() == [2, 2, 2]
    assert sizes(drop_remainder=False) == [3, 2, 2]


def test_fewer_examples_than_ranks(data_dir):
    strategy = SimpleNamespace(mesh=Mesh().resolve(size=3, rank=0))
    with pytest.raises(ValueError, match=r"'test\[:2\]' of 'digits' must .* 2 examples.*data=3"):
        load_for_rank("digits", "test[:2]", strategy, data_dir=data_dir)


def test_strategy_without_a_mesh(data_dir):
    with pytest.raises(ValueError, match="must have a mesh"):
        load_for_rank("digits", "test", tf.distribute.get_strategy(), data_dir=data_dir)


def test_mesh_that_is_not_resolved(data_dir):
    with pytest.raises(RuntimeError, match=r"strategy\.mesh"):
        load_for_rank("digits", "test", SimpleNamespace(mesh=Mesh()), data_dir=data_dir)


@pytest.mark.parametrize("num_shards, index", [(0, 0), (2, 2), (2, -1)])
def test_shard_that_is_not_there(num_shards, index):
    with pytest.raises(ValueError, match="Received: "):
        rank_split("train", num_shards, index)


def test_unknown_name(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'mnist'") as caught:
        load("mnits", "train", data_dir=tmp_path)
    assert "'mnits'" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, said", [("digits:9.9.9", "only: 1.0.0"), ("emnist/roman", "roman not found")]
)
def test_unknown_version_or_config(tmp_path, name, said):
    with pytest.raises(ValueError, match=said) as caught:
        load(name, "train", data_dir=tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_unknown_split(data_dir):
    with pytest.raises(ValueError, match=r"'trian'.*'digits'.*'train', 'test'"):
        load("digits", "trian", data_dir=data_dir)


@pytest.mark.parametrize("split", [None, ["train", "test"]])
def test_one_split_at_a_time(data_dir, split):
    with pytest.raises(ValueError, match="`split` must be one split"):
        load("digits", split, data_dir=data_dir)


def test_set_that_is_no_image_classification_set_is_not_even_downloaded(tmp_path):
    with pytest.raises(ValueError, match=r"image.*'imdb_reviews'.*'text'"):
        load("imdb_reviews", "train", data_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_set_that_is_not_prepared(tmp_path):
    with pytest.raises(ValueError, match=r"'mnist' is not prepared in data_dir=.*download=True"):
        load("mnist", "train", data_dir=tmp_path, download=False)


def test_set_that_cannot_be_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(downloader, "MAX_RETRIES", 0)
    # Nobody listens on this port.
    monkeypatch.setattr(mnist.MNIST, "URL", "http://127.0.0.1:9/")
    with pytest.raises(RuntimeError, match="'mnist' cannot be prepared in data_dir=") as caught:
        load("mnist", "train", data_dir=tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "ConnectionError" in str(caught.value)
    assert "'digits'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_those_who_wait_for_a_failure_do_not_repeat_it(tmp_path, monkeypatch):
    # Ranks in a row that each wait minutes for a network that is not there look like a hang.
    builder = SimpleNamespace(name="far_away", data_dir_root=tmp_path, is_prepared=lambda: False)
    begun, waiting = threading.Event(), threading.Event()
    monkeypatch.setattr(preparing.logging, "info", lambda *_: waiting.set())
    attempts = []

    def fail():
        attempts.append(1)
        begun.set()
        waiting.wait(timeout=20)
        raise ConnectionError("no route\nto host")

    first = threading.Thread(target=_ignoring_errors, args=(preparing.prepare_once, builder, fail))
    first.start()
    begun.wait(timeout=20)
    with pytest.raises(
        RuntimeError, match="another process could not prepare it: ConnectionError: no route"
    ):
        preparing.prepare_once(builder, fail)
    first.join(timeout=20)
    assert len(attempts) == 1
    # Whoever comes later tries again.
    with pytest.raises(ConnectionError):
        preparing.prepare_once(builder, fail)
    assert len(attempts) == 2


def _ignoring_errors(function, *args):
    try:
        function(*args)
    except Exception:
        return


def test_missing_tfds_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'tfdist\[data\]'"):
        load("digits", "train")
    with pytest.raises(ImportError, match=r"pip install 'tfdist\[data\]'"):
        read_config()


def test_missing_scikit_learn_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'tfdist\[data\]'"):
        load("digits", "train", data_dir=tmp_path)
