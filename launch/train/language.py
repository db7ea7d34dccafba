"""The task of `tfdist-train` for text: prediction of the next byte."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfdist.launch.flags.mesh import Layout
from tfdist.launch.flags.model_sizes import LONG, sizes_of
from tfdist.launch.flags.options import as_given, option, refuse_ignored
from tfdist.launch.flags.values import UsageError, data_file
from tfdist.launch.plan.automatic import Automatic, chosen
from tfdist.launch.train.fitting import warmup_cosine
from tfdist.launch.train.tasks import Data, Settings, Task
from tfdist.mesh import Mesh

if TYPE_CHECKING:
    from tfdist.addons.planner import Transformer

_MOST = 1 << 20
#: The most parameters of a model and tokens of a step, above those of any known training run.
_MOST_PARAMETERS = 10**13
_MOST_TOKENS = 1 << 26

_MESH = Mesh()
#: Tokens of a text: its bytes.
_BYTES = 256

#: The options that `config` replaces.
_SIZES = ("layers", "width", "heads", "kv_heads", "hidden", "vocabulary", "experts", "top_k")
#: The names of the options, in the order of the help.
NAMES = (
    "config",
    *_SIZES,
    *("seq_length", "dropout", "sample", "sequence_parallel", "context_attention"),
)

#: The prompt of a sample: the end of a paragraph.
_PROMPT = b"\n\n"
#: Below one, so that likely bytes are sampled more often than by the model's probabilities.
_TEMPERATURE = 0.8


@dataclasses.dataclass(frozen=True)
class LanguageOptions:
    """The options of a language model and of its text; see the flags of the same names."""

    config: str | None = option(None, "Sizes of a known model, or a config.json: llama3-8b")
    layers: int = option(4, "Transformer blocks", least=1, most=10_000)
    width: int = option(128, "Width of the residual stream", least=1, most=_MOST)
    heads: int = option(4, "Attention heads per block", least=1, most=_MOST)
    kv_heads: int | None = option(None, "Key/value heads [heads]", least=1, most=_MOST)
    hidden: int | None = option(None, "Hidden units of a block [4 width]", least=1, most=_MOST)
    vocabulary: int = option(_BYTES, "Size of the vocabulary", least=_BYTES, most=1 << 24)
    seq_length: int = option(128, "Bytes per window of text", least=1, most=_MOST)
    dropout: float = option(0.0, "Dropout rate", least=0.0, most=0.99)
    sequence_parallel: bool = option(False, "Split norms and dropout over --tensor too")
    experts: int | None = option(None, "Experts per block [dense]", least=1, most=100_000)
    top_k: int = option(2, "Experts per token", least=1, most=1000)
    context_attention: str = option(
        "ring", "Attention algorithm for --context", choices=("ring", "all_gather", "ulysses")
    )
    sample: int = option(0, "Bytes to generate after training", least=0, most=_MOST)

    def check(self, settings: Settings) -> None:
        """Reject other datasets, and sizes that are not divisible.

        Raises:
            UsageError: The options do not match each other or the settings.
        """
        if settings.dataset != "pydoc" and not settings.dataset.startswith("text:"):
            raise UsageError(
                f"--model={settings.model} requires --dataset=pydoc, or --dataset=text:FILE for a file. "
                f"Received: --dataset={settings.dataset}."
            )
        if self.sample and settings.layout.pipeline > 1:
            raise UsageError(
                "--sample is not supported in a pipeline, where a rank has only its stages. "
                f"Received: --sample={self.sample} --pipeline={settings.layout.pipeline}."
            )
        if settings.data_dir is not None:
            raise UsageError(
                "--data_dir requires --model=convnet or --model=mlp. Received: "
                f"--data_dir={settings.data_dir} --model={settings.model}."
            )
        if settings.dataset.startswith("text:"):
            data_file("dataset", settings.dataset.removeprefix("text:"), "text:")
        if self.config is None:
            _check_divides("width", self.width, "heads", self.heads)
            _check_divides("heads", self.heads, "tensor", settings.layout.tensor)
            self._check_experts(settings)
        sizes = self.sizes()
        self._check_size(settings, sizes)
        for axis, ranks in settings.layout.mesh.shape.items():
            # The context axis is checked below; a pipeline can be cut between any two layers.
            if axis not in (*_MESH.token_axes, *_MESH.stage_axes) and (
                why := sizes.divides(axis, ranks)
            ):
                raise UsageError(f"--{axis}={ranks} cannot split the model: {why}.")
        if self.sequence_parallel:
            _check_divides("seq_length", self.seq_length, "tensor", settings.layout.tensor)
        self._check_context(settings.layout, sizes)

    def sizes(self) -> Transformer:
        """The sizes of the model.

        Raises:
            UsageError: Options are incompatible, or a file is not a configuration.
        """
        from tfdist.addons.planner import Transformer

        dropout, length = self.dropout > 0, self.seq_length
        blockwise = length >= LONG and not dropout
        if self.config is not None:
            given = f"--config={self.config}"
            refuse_ignored(self, _SIZES, "cannot be combined with --config", given)
            sizes = sizes_of("config", self.config, length)
            if sizes.vocabulary < _BYTES:
                raise UsageError(
                    f"--config requires a vocabulary of at least {_BYTES} tokens, one for each byte. "
                    f"Received: {given} with {sizes.vocabulary} tokens."
                )
            return dataclasses.replace(sizes, dropout=dropout, blockwise=blockwise)
        try:
            return Transformer(
                **{name: getattr(self, name) for name in _SIZES},
                length=length,
                # Small models require far fewer steps with rotary than with learned position embeddings.
                learned_positions=False,
                dropout=dropout,
                blockwise=blockwise,
            )
        except ValueError as error:
            raise UsageError(f"{as_given(self, _SIZES)} is not supported: {error}") from None

    def _check_context(self, layout: Layout, sizes: Transformer) -> None:
        context, length = layout.context, self.seq_length
        given = f"--context={context}"
        if context == 1:
            refuse_ignored(self, ["context_attention"], "requires a context axis", given)
            return
        if self.dropout:
            raise UsageError(
                "--dropout is not supported with a context axis. Received: "
                f"{given} --dropout={self.dropout}. Omit --dropout."
            )
        if self.sequence_parallel and layout.tensor > 1:
            raise UsageError(
                "--sequence_parallel is not supported with a context axis, which splits all activations. "
                f"Received: {given} --sequence_parallel --tensor={layout.tensor}. Omit "
                "--sequence_parallel."
            )
        if layout.pipeline > 1 and length % (2 * context):
            raise UsageError(
                "--seq_length must be a multiple of twice --context in a pipeline. Received: "
                f"--seq_length={length} {given} --pipeline={layout.pipeline}."
            )
        chunk = -(-length // (2 * context))
        if (context - 1) * chunk >= length:
            raise UsageError(
                "--seq_length must be large enough for a token on each rank of the context axis. "
                f"Received: --seq_length={length} {given}."
            )
        heads = sizes.heads // layout.tensor
        if self.context_attention == "ulysses" and heads % context:
            raise UsageError(
                "--heads must be a multiple of --tensor times --context with --context_attention=ulysses. "
                f"Received: --heads={sizes.heads} --tensor={layout.tensor} {given}. Use other sizes, or "
                "--context_attention=ring."
            )

    def _check_experts(self, settings: Settings) -> None:
        experts, expert = self.experts, settings.layout.expert
        if experts is None:
            if expert > 1:
                raise UsageError(
                    f"--expert requires --experts. Received: --expert={expert} without --experts."
                )
            refuse_ignored(self, ["top_k"], "requires --experts", "without --experts")
            return
        _check_divides("experts", experts, "expert", expert)
        if self.top_k > experts:
            raise UsageError(
                "--top_k must be at most --experts. Received: "
                f"--top_k={self.top_k} --experts={experts}."
            )

    def _check_size(self, settings: Settings, sizes: Transformer) -> None:
        from tfdist.addons.planner.parts import count_parameters

        parameters = count_parameters(sizes)
        if parameters > _MOST_PARAMETERS:
            given = as_given(self, ["config", *_SIZES])
            raise UsageError(
                f"A model must have at most {_MOST_PARAMETERS:,} parameters. Received: {given} with "
                f"{parameters:,.0f}."
            )
        tokens = settings.batch_size * self.seq_length
        if tokens > _MOST_TOKENS:
            raise UsageError(
                f"A step must have at most {_MOST_TOKENS:,} tokens. Received: "
                f"--batch_size={settings.batch_size} --seq_length={self.seq_length}."
            )

    def planned(self, value: str, batch: int, ranks: int, limits: Mapping[str, Any]) -> Automatic:
        """Choose the layout of `--plan` for the model of the options.

        Args:
            value: The value of the flag.
            batch: Samples of an update.
            ranks: Number of ranks.
            limits: Arguments of `tfdist.addons.planner.Limits` from other flags.
        """
        split = self.sequence_parallel
        is_whole = split or self.dropout > 0
        axes = tuple(a for a in _MESH.order if not (is_whole and a in _MESH.token_axes))
        own = {"axes": axes, "sequence_parallel": (split,)}
        return chosen(value, self.sizes(), batch, ranks, limits={**own, **limits})


def _check_divides(what: str, value: int, by: str, divisor: int) -> None:
    if value % divisor:
        raise UsageError(
            f"--{what} must be a multiple of --{by}. Received: --{what}={value} --{by}={divisor}."
        )


class Language(Task):
    """A language model of bytes; see `tfdist.models.gpt` and `tfdist.addons.datasets.load_text`."""

    models = ("gpt",)
    dataset = "pydoc"
    # Small batches, because the text is small: an epoch has 657 steps.
    batch_size = 4
    epochs = 5
    learning_rate = 3e-3
    item = "tokens"

    def __init__(self, options: LanguageOptions):
        self.options = options

    def check(self, settings: Settings) -> None:
        """Reject other datasets, and sizes that are not divisible."""
        self.options.check(settings)

    def load(self, settings: Settings) -> Data:
        """Split the text into windows."""
        from tfdist.addons import datasets

        self._seed = settings.seed
        length = self.options.seq_length
        try:
            self._text = datasets.load_text(settings.dataset)
        except (ValueError, ImportError) as error:
            raise UsageError(
                f"--dataset={settings.dataset} could not be loaded: {error}"
            ) from error
        train = self._windows("train", shuffle_seed=settings.seed)
        validation = self._windows("validation")
        windows = int(train.cardinality())
        # The next epoch uses other windows, so the last incomplete batch can be dropped.
        batch_size = min(settings.batch_size, windows)
        steps = windows // batch_size
        tested = int(validation.cardinality())
        if settings.whole_batches:
            tested -= tested % settings.batch_size
        self._tested = tested * length
        validation = validation.batch(settings.batch_size, drop_remainder=settings.whole_batches)
        return Data(
            train=train.batch(batch_size, drop_remainder=True).prefetch(2),
            validation=validation.cache(),
            steps=steps,
            items=steps * batch_size * length,
        )

    def _windows(self, part: str, **options):
        from tfdist.addons import datasets

        length = self.options.seq_length
        try:
            return datasets.language_model_windows(getattr(self._text, part), length, **options)
        except ValueError as error:
            raise UsageError(
                f"--seq_length={length} is not supported for the {part} part of {self._text.name}: {error}"
            ) from error

    def build(self, settings: Settings):
        """Build a GPT of the sizes of the options."""
        from tfdist import models
        from tfdist.addons.planner.programs import gpt_arguments

        sizes = self.options.sizes()
        arguments = gpt_arguments(sizes) | {
            "dropout": self.options.dropout,
            "sequence_parallel": self.options.sequence_parallel,
            # Balancing over a sequence does not depend on a pipeline's micro-batches.
            "experts": {"balance_over": "sequence"} if sizes.experts else None,
            "context_attention": self.options.context_attention,
        }
        return models.gpt(sizes.vocabulary, **arguments)

    def callbacks(self) -> list:
        """The report of the load of experts, for models with experts."""
        if self.options.sizes().experts is None:
            return []
        from tfdist.addons.monitoring import ExpertLoad

        return [ExpertLoad(verbose=True)]

    def schedule(self, rate: float, steps: int):
        """Linear warm-up over a twentieth of the steps, then cosine decay to a tenth of the rate."""
        return warmup_cosine(rate, steps)

    def compile(self, model, rate, make_optimizer, **options) -> None:
        """Compile with AdamW and a loss for split logits, and without metrics, which require whole ones."""
        from tfdist import layers

        optimizer = make_optimizer(
            "AdamW",
            rate,
            undecayed=("bias", "gamma", "beta"),
            weight_decay=0.1,
            beta_2=0.95,
            global_clipnorm=1.0,
        )
        loss = layers.VocabParallelCrossEntropy(self.options.sizes().vocabulary)
        model.compile(optimizer, loss, **options)

    def verdict(self, logs) -> str:
        """The validation loss, perplexity, and bits per byte."""
        loss = logs["val_loss"]
        return (
            f"Validation loss {loss:.4f}, perplexity {math.exp(loss):.3f}, "
            f"{loss / math.log(2):.3f} bits per byte on {self._tested:,} bytes of "
            f"{self._text.name}"
        )

    def show(self, model) -> str | None:
        """A sample that the model generates after the end of a paragraph."""
        if not self.options.sample:
            return None
        from tfdist import models

        tokens = models.generate(
            model, list(_PROMPT), self.options.sample, temperature=_TEMPERATURE, seed=self._seed
        )
        written = [token for token in tokens[len(_PROMPT) :].tolist() if token < _BYTES]
        return bytes(written).decode(errors="replace")
