"""The task of `tfdist-train` for clicks: prediction of a user's clicks."""

from __future__ import annotations

from tfdist.launch.flags.values import UsageError
from tfdist.launch.train.tasks import Data, Settings, Task

_DENSE = 8
#: Rows of each table. The largest tables are split by rows; each of the others is on one rank.
_VOCABULARIES = (20_000, 5_000, 2_000, 500, 100, 20)
_TRAIN, _TEST = 400_000, 10_000


class Recommendation(Task):
    """The DLRM on synthetic clicks; see `tfdist.addons.recommenders.make_clicks`."""

    models = ("dlrm",)
    dataset = "clicks"
    batch_size = 256
    epochs = 1
    learning_rate = 2e-3
    item = "samples"
    divides_tables = True

    def check(self, settings: Settings) -> None:
        """Reject other datasets, and mesh axes that the model does not support."""
        if settings.dataset != self.dataset:
            raise UsageError(
                f"--model=dlrm requires --dataset=clicks. Received: --dataset={settings.dataset}."
            )
        if settings.data_dir is not None:
            raise UsageError(
                "--data_dir requires --model=convnet or --model=mlp. Received: "
                f"--data_dir={settings.data_dir} and --model=dlrm."
            )
        for axis in ("tensor", "pipeline"):
            if getattr(settings.layout, axis) > 1:
                raise UsageError(
                    f"--{axis} is not supported for --model=dlrm, which splits its tables over --data. "
                    f"Received: --{axis}={getattr(settings.layout, axis)}. Omit --{axis}."
                )

    def load(self, settings: Settings) -> Data:
        """Generate the clicks, which are the same on all ranks."""
        import tensorflow as tf

        from tfdist.addons.recommenders import make_clicks

        if settings.whole_batches:
            raise UsageError("--model=dlrm is not supported on a TPU. Received: --strategy=tpu.")
        train, clicks, _ = make_clicks(_TRAIN, _DENSE, _VOCABULARIES, seed=1)
        test, test_clicks, self._floor = make_clicks(_TEST, _DENSE, _VOCABULARIES, seed=2)
        batch = min(settings.batch_size, _TRAIN)
        rows = tf.data.Dataset.from_tensor_slices((train, clicks))
        return Data(
            train=rows.shuffle(_TRAIN, seed=settings.seed).batch(batch),
            validation=tf.data.Dataset.from_tensor_slices((test, test_clicks)).batch(batch),
            steps=-(-_TRAIN // batch),
            items=_TRAIN,
        )

    def build(self, settings: Settings):
        """Build the DLRM; the chief prints the placement of its tables."""
        from tfdist.addons.recommenders import dlrm

        model = dlrm(_DENSE, _VOCABULARIES)
        if settings.is_chief:
            print(model.get_layer("embeddings").report())
        return model

    def compile(self, model, rate, make_optimizer, **options) -> None:
        """Compile with Adam, cross-entropy and accuracy."""
        import keras

        model.compile(
            make_optimizer("Adam", rate),
            keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")],
            **options,
        )

    def verdict(self, logs) -> str:
        """The test accuracy and loss, and the lowest loss of any model."""
        return (
            f"Test accuracy {logs['val_accuracy']:.2%} and loss {logs['val_loss']:.4f}, of at best "
            f"{self._floor:.4f}, on {_TEST} clicks"
        )
