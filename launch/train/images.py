"""The task of `tfdist-train` for images: classification."""

from __future__ import annotations

import re

from tfdist.launch.flags.command import say
from tfdist.launch.flags.values import UsageError, data_folder, refuse
from tfdist.launch.train.tasks import Data, Settings, Task

#: A name, a configuration and a version in TFDS syntax.
_NAME = re.compile(r"[a-z][a-z0-9_]*(/[\w.+-]+)?(:[\w.*]+)?", re.ASCII)


class Images(Task):
    """Classification of images; the convnet reaches 98 to 99 % test accuracy on digits."""

    models = ("mlp", "convnet")
    dataset = "digits"
    batch_size = 128
    epochs = 15
    learning_rate = 1e-3
    item = "samples"

    def check(self, settings: Settings) -> None:
        """Reject other datasets, and mesh axes that these models do not support."""
        if settings.dataset == "pydoc" or settings.dataset.startswith("text:"):
            raise UsageError(
                f"--dataset={settings.dataset} requires --model=gpt. "
                f"Received: --model={settings.model}."
            )
        if settings.dataset == "clicks":
            raise UsageError(
                f"--dataset=clicks requires --model=dlrm. Received: --model={settings.model}."
            )
        if _NAME.fullmatch(settings.dataset) is None:
            raise refuse(
                "dataset",
                settings.dataset,
                "digits, or the name of a dataset of TensorFlow Datasets",
            )
        if settings.data_dir is not None:
            data_folder("data_dir", settings.data_dir)
        if settings.layout.tensor > 1:
            raise UsageError(
                f"--tensor is not supported for --model={settings.model}. Received: "
                f"--tensor={settings.layout.tensor}. Use --model=gpt, or omit --tensor."
            )

        if settings.layout.context > 1:
            raise UsageError(
                f"--context is not supported for --model={settings.model}. Received: "
                f"--context={settings.layout.context}. Use --model=gpt, or omit --context."
            )

    def load(self, settings: Settings) -> Data:
        """Load a dataset of `tfdist.addons.datasets`."""
        from tfdist.addons import datasets

        try:
            train, info = datasets.load(settings.dataset, "train", data_dir=settings.data_dir)
            test, _ = datasets.load(settings.dataset, "test", data_dir=settings.data_dir)
        except (ValueError, ImportError, RuntimeError) as error:
            raise UsageError(
                f"--dataset={settings.dataset} could not be loaded: {error}"
            ) from error
        self._info, self._name = info, settings.dataset
        size = info.splits["train"].num_examples
        if size < settings.batch_size:
            self._check_batch(settings, size)
        train = train.cache().shuffle(size, seed=settings.seed)
        # A pipeline requires full batches; the dropped samples differ between epochs by the shuffle.
        whole = settings.layout.pipeline > 1 or settings.whole_batches
        steps = size // settings.batch_size if whole else -(-size // settings.batch_size)
        test = test.batch(settings.batch_size, drop_remainder=settings.whole_batches)
        self._tested = info.splits["test"].num_examples
        if settings.whole_batches:
            self._tested -= self._tested % settings.batch_size
        return Data(
            train=train.batch(settings.batch_size, drop_remainder=whole),
            validation=test.cache(),
            steps=steps,
            items=min(size, steps * settings.batch_size),
        )

    def _check_batch(self, settings: Settings, size: int) -> None:
        """Report a batch that is larger than the dataset."""
        received = f"--batch_size={settings.batch_size}; {settings.dataset} has {size} samples"
        if settings.layout.pipeline > 1 or settings.whole_batches:
            raise UsageError(
                f"--batch_size must be at most the size of the dataset here. Received: {received}."
            )
        if settings.is_chief:
            say("tfdist-train", f"{received}: an epoch is one step.")

    def build(self, settings: Settings):
        """Build a model for the loaded images."""
        from tfdist import models

        features = self._info.features
        make = models.mlp if settings.model == "mlp" else models.convnet
        return make(features["image"].shape, features["label"].num_classes)

    def compile(self, model, rate, make_optimizer, **options) -> None:
        """Compile with Adam, cross-entropy and accuracy."""
        import keras

        model.compile(
            make_optimizer("Adam", rate),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **options,
        )

    def verdict(self, logs) -> str:
        """The test accuracy and loss."""
        return (
            f"Test accuracy {logs['val_accuracy']:.2%} and loss {logs['val_loss']:.4f} on "
            f"{self._tested} {self._name} images"
        )
