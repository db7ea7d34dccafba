"""The task of `tfdist-train` for text: prediction of the next byte."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfdist.launch.flags.mesh import Layout
from tfdist.launch.flags.model_sizes import LONG, sizes_of
from tfdist.launch.flags.values import UsageError, as_given, input_file, refuse_ignored
from tfdist.launch.plan.automatic import Automatic, chosen
from tfdist.launch.train.fitting import warmup_cosine
from tfdist.launch.train.tasks import DEFINE, Data, Settings, Task
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

_CONFIG = DEFINE.string("config", None, "Sizes of a known model, or a config.json: llama3-8b")
_LAYERS = DEFINE.integer("layers", 4, "Transformer blocks", lower_bound=1, upper_bound=10_000)
_WIDTH = DEFINE.integer(
    "width", 128, "Width of the residual stream", lower_bound=1, upper_bound=_MOST
)
_HEADS = DEFINE.integer("heads", 4, "Attention heads per block", lower_bound=1, upper_bound=_MOST)
_KV_HEADS = DEFINE.integer(
    "kv_heads", None, "Key/value heads [heads]", lower_bound=1, upper_bound=_MOST
)
_HIDDEN = DEFINE.integer(
    "hidden", None, "Hidden units of a block [4 width]", lower_bound=1, upper_bound=_MOST
)
_VOCABULARY = DEFINE.integer(
    "vocabulary", _BYTES, "Size of the vocabulary", lower_bound=_BYTES, upper_bound=1 << 24
)
_SEQ_LENGTH = DEFINE.integer(
    "seq_length", 128, "Bytes per window of text", lower_bound=1, upper_bound=_MOST
)
_DROPOUT = DEFINE.float("dropout", 0.0, "Dropout rate", lower_bound=0.0, upper_bound=0.99)
_SEQUENCE_PARALLEL = DEFINE.boolean(
    "sequence_parallel", False, "Split norms and dropout over --tensor too"
)
_EXPERTS = DEFINE.integer(
    "experts", None, "Experts per block [dense]", lower_bound=1, upper_bound=100_000
)
_TOP_K = DEFINE.integer("top_k", 2, "Experts per token", lower_bound=1, upper_bound=1000)
_CONTEXT_ATTENTION = DEFINE.enum(
    "context_attention",
    "ring",
    ["ring", "all_gather", "ulysses"],
    "Attention algorithm for --context",
)
_SAMPLE = DEFINE.integer(
    "sample", 0, "Bytes to generate after training", lower_bound=0, upper_bound=_MOST
)

#: The flags that --config replaces.
_SIZES = (_LAYERS, _WIDTH, _HEADS, _KV_HEADS, _HIDDEN, _VOCABULARY, _EXPERTS, _TOP_K)

#: The prompt of a sample: the end of a paragraph.
_PROMPT = b"\n\n"
#: Below one, so that likely bytes are sampled more often than by the model's probabilities.
_TEMPERATURE = 0.8


class Language(Task):
    """A language model of bytes; see `tfdist.models.gpt` and `tfdist.addons.datasets.load_text`."""

    models = ("gpt",)
    dataset = "pydoc"
    # Small batches, because the text is small: an epoch has 657 steps.
    batch_size = 4
    epochs = 5
    learning_rate = 3e-3
    item = "tokens"
    flags = (
        _CONFIG,
        *_SIZES,
        _SEQ_LENGTH,
        _DROPOUT,
        _SAMPLE,
        _SEQUENCE_PARALLEL,
        _CONTEXT_ATTENTION,
    )

    def check(self, settings: Settings) -> None:
        """Reject other datasets, and sizes that are not divisible."""
        if settings.dataset != "pydoc" and not settings.dataset.startswith("text:"):
            raise UsageError(
                f"--model={settings.model} requires --dataset=pydoc, or --dataset=text:FILE for a file. "
                f"Received: --dataset={settings.dataset}."
            )
        if _SAMPLE.value and settings.layout.pipeline > 1:
            raise UsageError(
                "--sample is not supported in a pipeline, where a rank has only its stages. "
                f"Received: --sample={_SAMPLE.value} --pipeline={settings.layout.pipeline}."
            )
        if settings.data_dir is not None:
            raise UsageError(
                "--data_dir requires --model=convnet or --model=mlp. Received: "
                f"--data_dir={settings.data_dir} --model={settings.model}."
            )
        if settings.dataset.startswith("text:"):
            input_file("dataset", settings.dataset.removeprefix("text:"), "text:")
        if _CONFIG.value is None:
            _check_divides("width", _WIDTH.value, "heads", _HEADS.value)
            _check_divides("heads", _HEADS.value, "tensor", settings.layout.tensor)
            self._check_experts(settings)
        sizes = self._sizes()
        self._check_size(settings, sizes)
        for axis, ranks in settings.layout.mesh.shape.items():
            # The context axis is checked below; a pipeline can be cut between any two layers.
            if axis not in (*_MESH.token_axes, *_MESH.stage_axes) and (
                why := sizes.divides(axis, ranks)
            ):
                raise UsageError(f"--{axis}={ranks} cannot split the model: {why}.")
        if _SEQUENCE_PARALLEL.value:
            _check_divides("seq_length", _SEQ_LENGTH.value, "tensor", settings.layout.tensor)
        self._check_context(settings.layout, sizes)

    def _sizes(self) -> Transformer:
        """The sizes of the model."""
        from tfdist.addons.planner import Transformer

        dropout, length = _DROPOUT.value > 0, _SEQ_LENGTH.value
        blockwise = length >= LONG and not dropout
        if _CONFIG.value is not None:
            given = f"--config={_CONFIG.value}"
            refuse_ignored(DEFINE.values, _SIZES, "cannot be combined with --config", given)
            sizes = sizes_of("config", _CONFIG.value, length)
            if sizes.vocabulary < _BYTES:
                raise UsageError(
                    f"--config requires a vocabulary of at least {_BYTES} tokens, one for each byte. "
                    f"Received: {given} with {sizes.vocabulary} tokens."
                )
            return dataclasses.replace(sizes, dropout=dropout, blockwise=blockwise)
        try:
            return Transformer(
                layers=_LAYERS.value,
                width=_WIDTH.value,
                heads=_HEADS.value,
                kv_heads=_KV_HEADS.value,
                hidden=_HIDDEN.value,
                vocabulary=_VOCABULARY.value,
                length=length,
                experts=_EXPERTS.value,
                top_k=_TOP_K.value,
                # Small models require far fewer steps with rotary than with learned position embeddings.
                learned_positions=False,
                dropout=dropout,
                blockwise=blockwise,
            )
        except ValueError as error:
            raise UsageError(
                f"{as_given(DEFINE.values, _SIZES)} is not supported: {error}"
            ) from None

    def _check_context(self, layout: Layout, sizes: Transformer) -> None:
        context, length = layout.context, _SEQ_LENGTH.value
        given = f"--context={context}"
        if context == 1:
            refuse_ignored(DEFINE.values, (_CONTEXT_ATTENTION,), "requires a context axis", given)
            return
        if _DROPOUT.value:
            raise UsageError(
                "--dropout is not supported with a context axis. Received: "
                f"{given} --dropout={_DROPOUT.value}. Omit --dropout."
            )
        if _SEQUENCE_PARALLEL.value and layout.tensor > 1:
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
        if _CONTEXT_ATTENTION.value == "ulysses" and heads % context:
            raise UsageError(
                "--heads must be a multiple of --tensor times --context with --context_attention=ulysses. "
                f"Received: --heads={sizes.heads} --tensor={layout.tensor} {given}. Use other sizes, or "
                "--context_attention=ring."
            )

    def _check_experts(self, settings: Settings) -> None:
        experts, expert = _EXPERTS.value, settings.layout.expert
        if experts is None:
            if expert > 1:
                raise UsageError(
                    f"--expert requires --experts. Received: --expert={expert} without --experts."
                )
            refuse_ignored(DEFINE.values, (_TOP_K,), "requires --experts", "without --experts")
            return
        _check_divides("experts", experts, "expert", expert)
        if _TOP_K.value > experts:
            raise UsageError(
                "--top_k must be at most --experts. Received: "
                f"--top_k={_TOP_K.value} --experts={experts}."
            )

    def _check_size(self, settings: Settings, sizes: Transformer) -> None:
        from tfdist.addons.planner.parts import count_parameters

        parameters = count_parameters(sizes)
        if parameters > _MOST_PARAMETERS:
            raise UsageError(
                f"A model must have at most {_MOST_PARAMETERS:,} parameters. Received: "
                f"{as_given(DEFINE.values, (_CONFIG, *_SIZES))} with {parameters:,.0f}."
            )
        tokens = settings.batch_size * _SEQ_LENGTH.value
        if tokens > _MOST_TOKENS:
            raise UsageError(
                f"A step must have at most {_MOST_TOKENS:,} tokens. Received: "
                f"--batch_size={settings.batch_size} --seq_length={_SEQ_LENGTH.value}."
            )

    def planned(self, value: str, batch: int, ranks: int, limits: Mapping[str, Any]) -> Automatic:
        """Choose the layout of `--plan` for the model of the flags.

        Args:
            value: The value of the flag.
            batch: Samples of an update.
            ranks: Number of ranks.
            limits: Arguments of `tfdist.addons.planner.Limits` from other flags.
        """
        split = _SEQUENCE_PARALLEL.value
        is_whole = split or _DROPOUT.value > 0
        axes = tuple(a for a in _MESH.order if not (is_whole and a in _MESH.token_axes))
        own = {"axes": axes, "sequence_parallel": (split,)}
        return chosen(value, self._sizes(), batch, ranks, limits={**own, **limits})

    def load(self, settings: Settings) -> Data:
        """Split the text into windows."""
        from tfdist.addons import datasets

        self._seed = settings.seed
        length = _SEQ_LENGTH.value
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

        length = _SEQ_LENGTH.value
        try:
            return datasets.language_model_windows(getattr(self._text, part), length, **options)
        except ValueError as error:
            raise UsageError(
                f"--seq_length={length} is not supported for the {part} part of {self._text.name}: {error}"
            ) from error

    def build(self, settings: Settings):
        """Build a GPT of the sizes of the flags."""
        from tfdist import models
        from tfdist.addons.planner.programs import gpt_arguments

        sizes = self._sizes()
        arguments = gpt_arguments(sizes) | {
            "dropout": _DROPOUT.value,
            "sequence_parallel": _SEQUENCE_PARALLEL.value,
            # Balancing over a sequence does not depend on a pipeline's micro-batches.
            "experts": {"balance_over": "sequence"} if sizes.experts else None,
            "context_attention": _CONTEXT_ATTENTION.value,
        }
        return models.gpt(sizes.vocabulary, **arguments)

    def callbacks(self) -> list:
        """The report of the load of experts, for models with experts."""
        if self._sizes().experts is None:
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
        loss = layers.VocabParallelCrossEntropy(self._sizes().vocabulary)
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
        if not _SAMPLE.value:
            return None
        from tfdist import models

        tokens = models.generate(
            model, list(_PROMPT), _SAMPLE.value, temperature=_TEMPERATURE, seed=self._seed
        )
        written = [token for token in tokens[len(_PROMPT) :].tolist() if token < _BYTES]
        return bytes(written).decode(errors="replace")


def _check_divides(what: str, value: int, by: str, divisor: int) -> None:
    if value % divisor:
        raise UsageError(
            f"--{what} must be a multiple of --{by}. Received: --{what}={value} --{by}={divisor}."
        )
