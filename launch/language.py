"""The task of `tfdist-train` for text: which byte comes next?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tfdist.launch.automatic import Automatic, chosen
from tfdist.launch.fitting import warmup_cosine
from tfdist.launch.flag_values import UsageError, as_given, input_file, refuse_ignored
from tfdist.launch.mesh_flags import Layout
from tfdist.launch.model_sizes import LONG, sizes_of
from tfdist.launch.tasks import DEFINE, Data, Settings, Task
from tfdist.mesh import Mesh

if TYPE_CHECKING:
    from tfdist.addons.planner import Transformer

_MOST = 1 << 20
#: Of a model, and of a step: above anything that was ever trained.
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
    "vocabulary", _BYTES, "Tokens of the vocabulary", lower_bound=_BYTES, upper_bound=1 << 24
)
_SEQ_LENGTH = DEFINE.integer(
    "seq_length", 128, "Bytes per window of text", lower_bound=1, upper_bound=_MOST
)
_DROPOUT = DEFINE.float("dropout", 0.0, "Dropout rate", lower_bound=0.0, upper_bound=0.99)
_SEQUENCE_PARALLEL = DEFINE.boolean(
    "sequence_parallel", False, "Splits norms and dropout over --tensor too"
)
_EXPERTS = DEFINE.integer(
    "experts", None, "Feed-forward networks per block", lower_bound=1, upper_bound=100_000
)
_TOP_K = DEFINE.integer(
    "top_k", 2, "Of these, how many a token goes through", lower_bound=1, upper_bound=1000
)
_CONTEXT_ATTENTION = DEFINE.enum(
    "context_attention",
    "ring",
    ["ring", "all_gather", "ulysses"],
    "How attention spans --context",
)
_SAMPLE = DEFINE.integer(
    "sample", 0, "Bytes to generate after training", lower_bound=0, upper_bound=_MOST
)

#: What --config says instead.
_SIZES = (_LAYERS, _WIDTH, _HEADS, _KV_HEADS, _HIDDEN, _VOCABULARY, _EXPERTS, _TOP_K)

#: What a sample goes on from: the end of a paragraph.
_PROMPT = b"\n\n"
#: Below one: likely bytes more often than the model would, unlikely ones seldom.
_TEMPERATURE = 0.8


class Language(Task):
    """A language model of bytes; see `tfdist.models.gpt` and `tfdist.addons.datasets.load_text`."""

    models = ("gpt",)
    dataset = "pydoc"
    # Small steps, for there is little text: a pass over it takes 657 of them.
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
        """Refuses what is no text, and sizes that do not divide."""
        if settings.dataset != "pydoc" and not settings.dataset.startswith("text:"):
            raise UsageError(
                f"--model={settings.model} learns from --dataset=pydoc, or from a file with "
                f"--dataset=text:FILE. Received: --dataset={settings.dataset}."
            )
        if _SAMPLE.value and settings.layout.pipeline > 1:
            raise UsageError(
                "--sample needs the whole model, but a pipeline rank holds only its stages. "
                f"Received: --sample={_SAMPLE.value} --pipeline={settings.layout.pipeline}."
            )
        if settings.data_dir is not None:
            raise UsageError(
                "--data_dir is for images, --model=convnet or --model=mlp. Received: "
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
            # What a context axis asks of a sequence stands below; a pipeline is cut between any two layers.
            if axis not in (*_MESH.token_axes, *_MESH.stage_axes) and (
                why := sizes.divides(axis, ranks)
            ):
                raise UsageError(f"--{axis}={ranks} cannot divide the model: {why}.")
        if _SEQUENCE_PARALLEL.value:
            _check_divides("seq_length", _SEQ_LENGTH.value, "tensor", settings.layout.tensor)
        self._check_context(settings.layout, sizes)

    def _sizes(self) -> Transformer:
        """The model of the flags."""
        from tfdist.addons.planner import Transformer

        dropout, length = _DROPOUT.value > 0, _SEQ_LENGTH.value
        blockwise = length >= LONG and not dropout
        if _CONFIG.value is not None:
            given = f"--config={_CONFIG.value}"
            refuse_ignored(DEFINE.values, _SIZES, "is what --config says", given)
            sizes = sizes_of("config", _CONFIG.value, length)
            if sizes.vocabulary < _BYTES:
                raise UsageError(
                    f"--config requires a vocabulary of {_BYTES} tokens at least, one for each byte. "
                    f"Received: {given}, which has {sizes.vocabulary}."
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
                # Small models learn with rotary ones in a fraction of the steps that learned ones take.
                learned_positions=False,
                dropout=dropout,
                blockwise=blockwise,
            )
        except ValueError as error:
            raise UsageError(f"{as_given(DEFINE.values, _SIZES)}: {error}") from None

    def _check_context(self, layout: Layout, sizes: Transformer) -> None:
        context, length = layout.context, _SEQ_LENGTH.value
        given = f"--context={context}"
        if context == 1:
            refuse_ignored(DEFINE.values, (_CONTEXT_ATTENTION,), "is for a context axis", given)
            return
        if _DROPOUT.value:
            raise UsageError(
                "On a context axis no rank holds attention weights as a whole to drop some. Received: "
                f"{given} --dropout={_DROPOUT.value}; leave --dropout out."
            )
        if _SEQUENCE_PARALLEL.value and layout.tensor > 1:
            raise UsageError(
                "A context axis splits all activations already: leave --sequence_parallel out. "
                f"Received: {given} --sequence_parallel --tensor={layout.tensor}."
            )
        if layout.pipeline > 1 and length % (2 * context):
            raise UsageError(
                "In a pipeline --seq_length must be a multiple of twice --context. Received: "
                f"--seq_length={length} {given} --pipeline={layout.pipeline}."
            )
        chunk = -(-length // (2 * context))
        if (context - 1) * chunk >= length:
            raise UsageError(
                f"Each rank of the context axis has a token at least. Received: --seq_length={length} "
                f"{given}."
            )
        heads = sizes.heads // layout.tensor
        if _CONTEXT_ATTENTION.value == "ulysses" and heads % context:
            raise UsageError(
                "--context_attention=ulysses gives each rank of the context axis as many heads: --heads "
                f"must be a multiple of --tensor times --context. Received: --heads={sizes.heads} "
                f"--tensor={layout.tensor} {given}; or take ring."
            )

    def _check_experts(self, settings: Settings) -> None:
        experts, expert = _EXPERTS.value, settings.layout.expert
        if experts is None:
            if expert > 1:
                raise UsageError(
                    "--expert divides the experts of a model. Received: "
                    f"--expert={expert}, and no --experts."
                )
            refuse_ignored(DEFINE.values, (_TOP_K,), "is for --experts", "no --experts")
            return
        _check_divides("experts", experts, "expert", expert)
        if _TOP_K.value > experts:
            raise UsageError(
                f"--top_k is at most --experts. Received: --top_k={_TOP_K.value} --experts={experts}."
            )

    def _check_size(self, settings: Settings, sizes: Transformer) -> None:
        from tfdist.addons.planner.parts import count_parameters

        parameters = count_parameters(sizes)
        if parameters > _MOST_PARAMETERS:
            raise UsageError(
                f"A model has at most {_MOST_PARAMETERS:,} parameters. Received: "
                f"{as_given(DEFINE.values, (_CONFIG, *_SIZES))}, which is {parameters:,.0f}."
            )
        tokens = settings.batch_size * _SEQ_LENGTH.value
        if tokens > _MOST_TOKENS:
            raise UsageError(
                f"A step has at most {_MOST_TOKENS:,} tokens. Received: "
                f"--batch_size={settings.batch_size} --seq_length={_SEQ_LENGTH.value}."
            )

    def planned(self, value: str, batch: int, ranks: int, limits: Mapping[str, Any]) -> Automatic:
        """The layout that `--plan` chooses for the model of the flags.

        Args:
            value: The flag's.
            batch: Samples of an update.
            ranks: Ranks that were started.
            limits: What other flags say, as `tfdist.addons.planner.Limits` has it.
        """
        split = _SEQUENCE_PARALLEL.value
        is_whole = split or _DROPOUT.value > 0
        axes = tuple(a for a in _MESH.order if not (is_whole and a in _MESH.token_axes))
        own = {"axes": axes, "sequence_parallel": (split,)}
        return chosen(value, self._sizes(), batch, ranks, limits={**own, **limits})

    def load(self, settings: Settings) -> Data:
        """Cuts the text into windows."""
        from tfdist.addons import datasets

        self._seed = settings.seed
        length = _SEQ_LENGTH.value
        try:
            self._text = datasets.load_text(settings.dataset)
        except (ValueError, ImportError) as error:
            raise UsageError(f"--dataset={settings.dataset}: {error}") from error
        train = self._windows("train", shuffle_seed=settings.seed)
        validation = self._windows("validation")
        windows = int(train.cardinality())
        # The next epoch draws other windows, so the few that fill no batch are no loss.
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
                f"--seq_length={length}: the {part} part of {self._text.name}: {error}"
            ) from error

    def build(self, settings: Settings):
        """Makes a GPT of the sizes in the flags."""
        from tfdist import models
        from tfdist.addons.planner.programs import gpt_arguments

        sizes = self._sizes()
        arguments = gpt_arguments(sizes) | {
            "dropout": _DROPOUT.value,
            "sequence_parallel": _SEQUENCE_PARALLEL.value,
            # Of each sequence, so that a pipeline's micro-batches change nothing.
            "experts": {"balance_over": "sequence"} if sizes.experts else None,
            "context_attention": _CONTEXT_ATTENTION.value,
        }
        return models.gpt(sizes.vocabulary, **arguments)

    def callbacks(self) -> list:
        """How evenly experts are used, where there are some."""
        if self._sizes().experts is None:
            return []
        from tfdist.addons.monitoring import ExpertLoad

        return [ExpertLoad(verbose=True)]

    def schedule(self, rate: float, steps: int):
        """Up from zero in a twentieth of the steps, then a cosine down to a tenth of the rate."""
        return warmup_cosine(rate, steps)

    def compile(self, model, rate, make_optimizer, **options) -> None:
        """AdamW and a loss that takes logits as they are split; no metric, which would not."""
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
        """Loss, and what it means."""
        loss = logs["val_loss"]
        return (
            f"Validation loss {loss:.4f}, perplexity {math.exp(loss):.3f}, "
            f"{loss / math.log(2):.3f} bits per byte on {self._tested:,} bytes of "
            f"{self._text.name}"
        )

    def show(self, model) -> str | None:
        """What the model writes after the end of a paragraph."""
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
