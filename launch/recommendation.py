"""The task of `tfdist-train` for clicks: does a user click?"""

from __future__ import annotations

from tfdist.launch.flag_values import UsageError
from tfdist.launch.tasks import Data, Settings, Task

_DENSE = 8
#: Of each table. The largest are cut by rows; the others lie whole on a rank.
_VOCABULARIES = (20_000, 5_000, 2_000, 500, 100, 20)
_TRAIN, _TEST = 400_000, 10_000


class Recommendation(Task):
    """The DLRM on clicks by a known rule; see `tfdist.addons.recommenders.make_clicks`."""

    models = ("dlrm",)
    dataset = "clicks"
    batch_size = 256
    epochs = 1
    learning_rate = 2e-3
    item = "samples"
    divides_tables = True

    def check(self, settings: Settings) -> None:
        """Refuses other data sets, and a mesh that the model makes no use of."""
        if settings.dataset != self.dataset:
            raise UsageError(
                f"--model=dlrm learns from --dataset=clicks. Received: --dataset={settings.dataset}."
            )
        if settings.data_dir is not None:
            raise UsageError(
                "--data_dir is for images, --model=convnet or --model=mlp. Received: "
                f"--data_dir={settings.data_dir} and --model=dlrm."
            )
        for axis in ("tensor", "pipeline"):
            if getattr(settings.layout, axis) > 1:
                raise UsageError(
                    f"--{axis}={getattr(settings.layout, axis)}: --model=dlrm splits its tables over "
                    f"the ranks of --data. Leave --{axis} out."
                )

    def load(self, settings: Settings) -> Data:
        """Draws the clicks, the same ones on every rank."""
        import tensorflow as tf

        from tfdist.addons.recommenders import make_clicks

        if settings.whole_batches:
            raise UsageError("--strategy=tpu: --model=dlrm trains on CPUs and GPUs.")
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
        """Makes the DLRM; the chief says where its tables lie."""
        from tfdist.addons.recommenders import dlrm

        model = dlrm(_DENSE, _VOCABULARIES)
        if settings.is_chief:
            print(model.get_layer("embeddings").report())
        return model

    def compile(self, model, rate, make_optimizer, **options) -> None:
        """Adam, cross-entropy and accuracy."""
        import keras

        model.compile(
            make_optimizer("Adam", rate),
            keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")],
            **options,
        )

    def verdict(self, logs) -> str:
        """The loss, and the least that any model can have."""
        return (
            f"Test accuracy {logs['val_accuracy']:.2%} and loss {logs['val_loss']:.4f}, of at best "
            f"{self._floor:.4f}, on {_TEST} clicks"
        )
