"""The UCI handwritten digits as a TFDS dataset: real images that need no download."""

from __future__ import annotations

import numpy as np
from absl import logging

from tfdist.addons.datasets.preparing import import_tfds, prepare_once

# TFDS is needed by the class statement below; without it this raises an error with a remedy.
import_tfds()

import tensorflow_datasets as tfds  # noqa: E402

#: One image of five is for testing: 360 of 1797.
_TEST_EVERY = 5

_DESCRIPTION = """\
Handwritten digits of 13 people as 8x8 images: the test set of the UCI "Optical Recognition of
Handwritten Digits", as included in scikit-learn. Each pixel counts the black dots, 0 to 16, in a
4x4 block of a 32x32 bitmap. 1437 images for training and 360 for testing, both with all ten
classes and images of every writer.
"""

_CITATION = """\
@misc{alpaydin1998optical,
  title = {Optical Recognition of Handwritten Digits},
  author = {Alpaydin, E. and Kaynak, C.},
  year = {1998},
  publisher = {UCI Machine Learning Repository},
  doi = {10.24432/C50P49}
}
"""


class Digits(tfds.core.GeneratorBasedBuilder):
    """1797 real images of handwritten digits, prepared in a second from scikit-learn's copy.

    ```pycon
    >>> builder = Digits(data_dir="data")
    >>> builder.download_and_prepare()
    >>> train, test = builder.as_dataset(split=["train", "test"], as_supervised=True)
    ```

    Importing this module registers the dataset with TFDS, so that `tfds.load("digits")` works.

    Features: `image`, uint8 of shape (8, 8, 1), with the original values 0 to 16, which are not scaled
    to 255 (`info.metadata["max_value"]` is 16, by which `tfdist.addons.datasets.load` scales), and
    `label`, a class from 0 to 9.

    Splits: the original is sorted by writers, so its last fifth would contain writers that are not in
    the rest (and a part of one that is). Here every fifth image of each class in that order is for
    testing: both splits have each class and each writer in the same proportions, without random numbers
    that a library could change. Accuracy on `test` is therefore that for known writers; for unknown ones
    expect a few percent less. On disk TFDS shuffles the examples of each split by a hash of their index,
    so that consecutive ranges, one per rank, have similar distributions too.

    Several processes may prepare the dataset in one `data_dir` at the same time.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First release."}

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=_DESCRIPTION,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(
                        shape=(8, 8, 1), dtype=np.uint8, encoding_format="png"
                    ),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://archive.ics.uci.edu/dataset/80",
            citation=_CITATION,
            metadata=tfds.core.MetadataDict(max_value=16),
        )

    def download_and_prepare(self, **kwargs) -> None:
        """Writes the dataset to `data_dir`, unless it exists.

        While one process writes, others that prepare the same dataset wait, and then read.

        Args:
            **kwargs: As for `tfds.core.DatasetBuilder.download_and_prepare`.

        Raises:
            ImportError: scikit-learn, which includes the images, is not installed.
        """
        prepare = super().download_and_prepare
        prepare_once(self, lambda: prepare(**kwargs))

    # TFDS logs downloads of unknown size and cannot be configured not to; here nothing is
    # downloaded, and preparing is fast.

    def _log_download_bytes(self) -> None:
        pass

    def _log_download_done(self) -> None:
        logging.info("Dataset %s prepared to %s.", self.name, self.data_dir)

    def _split_generators(self, dl_manager):
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError(
                "The digits require scikit-learn, which is not installed. Run: pip install 'tfdist[data]'"
            ) from error
        digits = load_digits()
        images = digits.images.astype(np.uint8)[..., np.newaxis]
        labels = digits.target
        # A stable sort keeps the order of the writers within each class.
        by_class = np.argsort(labels, kind="stable")
        is_test = np.zeros(len(labels), bool)
        is_test[by_class[::_TEST_EVERY]] = True
        return {
            "train": self._generate_examples(images, labels, np.flatnonzero(~is_test)),
            "test": self._generate_examples(images, labels, np.flatnonzero(is_test)),
        }

    def _generate_examples(self, images, labels, indices):
        for index in indices:
            yield int(index), {"image": images[index], "label": int(labels[index])}
