"""Image classification datasets for one process or for each rank of a mesh, through TFDS."""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdist.addons.datasets.preparing import first_line, import_tfds, prepare
from tfdist.data.sharding import mark_per_rank
from tfdist.mesh import Mesh
from tfdist.utils import checks

if TYPE_CHECKING:
    import tensorflow_datasets as tfds


def load(
    name: str,
    split: Any,
    *,
    data_dir: str | os.PathLike | None = None,
    download: bool = True,
    read_config: tfds.ReadConfig | None = None,
) -> tuple[tf.data.Dataset, tfds.core.DatasetInfo]:
    """Returns one split of an image classification dataset, example by example.

    ```pycon
    >>> train, info = load("digits", "train", data_dir="data")
    >>> train.element_spec
    (TensorSpec(shape=(8, 8, 1), dtype=tf.float32, name=None), TensorSpec(shape=(), dtype=tf.int64, name=None))
    >>> info.features["label"].num_classes
    10
    ```

    Several processes of one machine may load the same dataset at once: one prepares it, the others
    wait. Hosts that share a `data_dir` without file locks may each prepare it, and the first to
    finish wins. Preparing preserves Python's random state, so that ranks that prepare and ranks that
    find the data ready draw the same seeds afterwards.

    Args:
        name: "digits" (`tfdist.addons.datasets.digits.Digits`, which needs no download) or any TFDS name of
            an image classification dataset, such as "mnist", "cifar10" or "emnist/letters:3.1.0".
        split: One split in TFDS' notation, such as "train", "train[:80%]" or "train+test", or a result
            of `rank_split`. A split of `rank_split` without examples gives an empty dataset.
        data_dir: The folder of the prepared data. By default that of TFDS.
        download: Whether to download and prepare the dataset if it does not exist.
        read_config: The read configuration; `read_config()` by default. Files are read in shuffled order
            if it has a seed.

    Returns:
        The dataset of (image, label) pairs, and the TFDS info of the whole dataset. The image is
        float32 of the dataset's own shape (height, width, channels) with values in [0, 1], the label
        an int64 scalar.

    Raises:
        ValueError: The name or the split is unknown, the dataset is not one of integer images with
            one class each, or it is not prepared and `download` is false.
        RuntimeError: The dataset cannot be downloaded or prepared. Without a network TFDS retries for
            some minutes before the error.
        ImportError: TensorFlow Datasets is not installed.
    """
    _check_set(name, split, data_dir, download)
    tfds = import_tfds()
    checks.instance("read_config", read_config, tfds.ReadConfig, "a tfds.ReadConfig", optional=True)
    builder = open_builder(name, data_dir)
    scale = 1.0 / _max_value(name, builder.info)
    prepare_builder(builder, name, download=download, instead="'digits'")
    dataset = _read(builder, name, split, read_config or _default_read_config())

    def normalize(image, label):
        return tf.cast(image, tf.float32) * scale, label

    return dataset.map(
        normalize, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    ), builder.info


def load_for_rank(
    name: str,
    split: str,
    strategy: Any,
    *,
    data_dir: str | os.PathLike | None = None,
    download: bool = True,
    seed: int | None = None,
    drop_remainder: bool = True,
) -> tuple[tf.data.Dataset, tfds.core.DatasetInfo]:
    """Returns this rank's share of a split, example by example.

    The split is sharded over the data axis only: ranks that differ in their pipeline or tensor
    coordinate read the same examples in the same order.

    ```pycon
    >>> train, info = load_for_rank("digits", "train", strategy)
    >>> model.fit(train.shuffle(1024, seed=0).batch(32), epochs=3)  # 32 per rank of the data axis
    ```

    The share is a consecutive range of the split, so the ranks' batches together are not the batch
    that one process would read. If results must equal those of one process, and to evaluate every
    example, pass the same `load(...)`, batched to the global batch, on all ranks: the strategy shards
    each batch. The result of this function is marked as sharded already, also after
    `map`, `shuffle`, `batch` and similar methods.

    Args:
        name: As for `load`.
        split: As for `load`.
        strategy: A strategy with the resolved mesh as `strategy.mesh`.
        data_dir: As for `load`. Each host reads its own, or all share one.
        download: As for `load`.
        seed: Reads the files in an order drawn from this seed; see `read_config`.
        drop_remainder: Whether to drop the last examples of a split that is not divisible, so that all
            ranks have the same number. If false, shares differ by one example and so, at times, by one
            batch: then truncate them to the same number with `.batch(...).take(...)`, since ranks
            wait for each other in every step.

    Returns:
        As `load` does.

    Raises:
        ValueError: `strategy` has no mesh, the split has fewer examples than there are shares
            and `drop_remainder` is true, or as for `load`.
        RuntimeError: The mesh is not resolved, or as for `load`.
        ImportError: TensorFlow Datasets is not installed.
    """
    _check_set(name, split, data_dir, download)
    checks.integer("seed", seed, minimum=0, maximum=2**63 - 1, optional=True)
    checks.boolean("drop_remainder", drop_remainder)
    mesh = getattr(strategy, "mesh", None)
    if not isinstance(mesh, Mesh):
        raise ValueError(
            "`strategy` must have a mesh, which determines this rank's share. Received: "
            f"{checks.shown(strategy)}, which has none. Pass a strategy of `tfdist.strategies`, "
            "or use `load` with `rank_split`."
        )
    ranks = mesh.group(*mesh.row_axes)
    part = rank_split(split, len(ranks), ranks.index(mesh.rank), drop_remainder=drop_remainder)
    dataset, info = load(
        name,
        part,
        data_dir=data_dir,
        download=download,
        read_config=read_config(seed),
    )
    if drop_remainder and info.splits[part].num_examples == 0:
        raise ValueError(
            f"The split {split!r} of {name!r} must have an example for each rank of the data axis. "
            f"Received: {info.splits[split].num_examples} examples, {mesh}. Use more data, or fewer ranks."
        )
    return mark_per_rank(dataset), info


def rank_split(split: Any, num_shards: int, index: int, *, drop_remainder: bool = False) -> Any:
    """Returns the part of a split for shard `index` of `num_shards`.

    The parts are consecutive ranges; every example is in exactly one, and their sizes differ by at
    most one, the first being the larger (in a sum such as "train+test" that applies to each term).
    `drop_remainder` makes all parts equal, and drops the remainder.

    ```pycon
    >>> [len(list(load("digits", rank_split("test", 7, index))[0])) for index in range(7)]
    [52, 52, 52, 51, 51, 51, 51]
    ```

    Returns:
        A TFDS split, for `load`, `tfds.load` and `builder.as_dataset`.
    """
    checks.integer("num_shards", num_shards, minimum=1, maximum=_MOST_SHARDS)
    checks.integer("index", index, minimum=0)
    checks.boolean("drop_remainder", drop_remainder)
    tfds = import_tfds()
    if not isinstance(split, str | tfds.core.splits.AbstractSplit):
        raise checks.refuse("split", split, _SPLIT)
    checks.text("split", str(split))
    if index >= num_shards:
        raise ValueError(
            f"The `index` of a part must be in [0, num_shards). Received: index={index}, "
            f"num_shards={num_shards}."
        )
    return tfds.even_splits(split, num_shards, drop_remainder=drop_remainder)[index]


def read_config(
    seed: int | None = None, input_context: tf.distribute.InputContext | None = None
) -> tfds.ReadConfig:
    """Returns a TFDS read configuration under which the order of the examples is fixed.

    Args:
        seed: `load` reads the files in an order drawn from this seed, which differs between epochs
            and is the same in every run. None reads them in the order of their names. A dataset in one
            file, such as digits or mnist, has only one order: shuffle the examples with
            `dataset.shuffle(size, seed=seed)`.
        input_context: Shards the files, not the examples, over the input pipelines of
            `strategy.distribute_datasets_from_function`. Requires a file for each pipeline at least: for
            smaller datasets use `rank_split`.
    """
    checks.integer("seed", seed, minimum=0, maximum=2**63 - 1, optional=True)
    checks.instance(
        "input_context",
        input_context,
        tf.distribute.InputContext,
        "a tf.distribute.InputContext",
        optional=True,
    )
    options = tf.data.Options()
    options.deterministic = True
    return import_tfds().ReadConfig(options=options, shuffle_seed=seed, input_context=input_context)


_SPLIT = "one split in TFDS' notation, such as 'train', or one of `rank_split`"
#: More than there are ranks anywhere.
_MOST_SHARDS = 1 << 20


def _check_set(name: str, split: Any, data_dir: str | os.PathLike | None, download: bool) -> None:
    checks.text("name", name)
    if split is None or isinstance(split, str | int | float | bytes | list | tuple | dict):
        if not isinstance(split, str) or not split.strip():
            raise checks.refuse("split", split, _SPLIT)
        checks.text("split", split)
    checks.path("data_dir", data_dir, optional=True)
    checks.boolean("download", download)


#: `load` has an argument of the same name.
_default_read_config = read_config


def open_builder(name: str, data_dir: str | os.PathLike | None) -> tfds.core.DatasetBuilder:
    """The builder of a dataset, whose files need not exist yet.

    Raises:
        ImportError: TFDS is not installed.
        ValueError: There is no such dataset, or it cannot be opened.
    """
    tfds = import_tfds()
    from tfdist.addons.datasets import digits  # noqa: F401  (registers "digits" with TFDS)

    root = tfds.core.constants.DATA_DIR if data_dir is None else os.fspath(data_dir)
    try:
        return tfds.builder(name, data_dir=os.path.expanduser(root))
    except tfds.core.DatasetNotFoundError:
        near = difflib.get_close_matches(name, tfds.list_builders(), n=1)
        raise ValueError(
            f"Dataset {name!r} was not found in TFDS or in data_dir={root!r}. "
            + (f"Did you mean {near[0]!r}?" if near else "`tfds.list_builders()` lists the names.")
        ) from None
    except Exception as error:
        raise ValueError(
            f"The dataset {name!r} cannot be opened in data_dir={root!r}: {first_line(error)}."
        ) from error


def prepare_builder(
    builder: tfds.core.DatasetBuilder, name: str, *, download: bool, instead: str
) -> None:
    """Writes a dataset's files if they do not exist; of several processes only one does.

    Args:
        builder: Its builder.
        name: The user's name of it.
        download: Whether its files may be written.
        instead: A similar dataset that needs no download, for the message.

    Raises:
        ImportError: The dataset needs a library that is not installed.
        ValueError: The files do not exist, and must not be written.
        RuntimeError: The files cannot be written.
    """
    # TFDS' check alone would log a warning if nothing exists yet.
    if builder.data_path.exists() and builder.is_prepared():
        return
    where = f"data_dir={os.fspath(builder.data_dir_root)!r}"
    if not download:
        raise ValueError(
            f"The dataset {name!r} is not prepared in {where}. Pass `download=True`, or the "
            "data_dir that contains it."
        )
    try:
        prepare(builder)
    except ImportError:
        raise
    except Exception as error:
        raise RuntimeError(
            f"The dataset {name!r} cannot be prepared in {where}: {first_line(error)}. Prepare "
            "it on a machine with network access and copy the folder, or use one that needs no "
            f"download: {instead}."
        ) from error


def _max_value(name: str, info: tfds.core.DatasetInfo) -> int:
    """The pixel value that represents 1.0; checks that this is an image classification dataset."""
    features = import_tfds().features
    keys = info.supervised_keys
    if keys and len(keys) == 2 and all(isinstance(key, str) for key in keys):
        image, label = (info.features[key] for key in keys)
        if (
            isinstance(image, features.Image)
            and isinstance(label, features.ClassLabel)
            and np.issubdtype(image.np_dtype, np.integer)
        ):
            return int((info.metadata or {}).get("max_value", np.iinfo(image.np_dtype).max))
    raise ValueError(
        f"`load` requires a dataset of integer images with one class each. Received: {name!r}, with the "
        f"supervised keys {keys!r} and the features {list(info.features)!r}. Read it with "
        "`tfds.load`."
    )


def _read(
    builder: tfds.core.DatasetBuilder, name: str, split: Any, config: tfds.ReadConfig
) -> tf.data.Dataset:
    """The (image, label) pairs of one split as they are stored."""

    def read(split):
        return builder.as_dataset(
            split=split,
            as_supervised=True,
            shuffle_files=config.shuffle_seed is not None,
            read_config=config,
        )

    try:
        # TFDS does not read an empty split, but a rank may have no example if there are few.
        if not isinstance(split, str) and builder.info.splits[split].num_examples == 0:
            whole = next(iter(builder.info.splits))
            return read(whole).take(0)
        return read(split)
    except Exception as error:
        raise ValueError(
            f"The split {split!r} of the dataset {name!r} in "
            f"data_dir={os.fspath(builder.data_dir_root)!r} cannot be read: {first_line(error)}."
        ) from error
