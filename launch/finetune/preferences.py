"""The options of `tfdist-finetune` for pairs of answers."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdist.launch.finetune.chat import CHAT, ChatOptions
from tfdist.launch.flags.options import option, refuse_ignored
from tfdist.launch.flags.values import UsageError

_KINDS = ("none", "dpo", "ipo", "conservative", "robust", "orpo")


@dataclasses.dataclass(frozen=True)
class PreferenceOptions:
    """The options of losses of pairs; see the flags of the same names."""

    preference: str = option(
        "none", "Loss of pairs of a chosen and a rejected answer in chat:FILE", choices=_KINDS
    )
    beta: float = option(0.1, "Factor of the difference in --preference", least=1e-9, most=1e9)
    label_smoothing: float = option(
        0.0,
        "Share of pairs the wrong way round, for conservative and robust",
        least=0.0,
        most=0.499,
    )
    reference: str = option(
        "initial",
        "Reference model of --preference: as before training, or without adapters (base)",
        choices=("initial", "base"),
    )

    @property
    def is_used(self) -> bool:
        """Whether the data are pairs of answers."""
        return self.preference != "none"

    def check(
        self, dataset: str, chat: ChatOptions, *, adapters: bool, batch_shares: str = "equal"
    ) -> None:
        """Check the options before the rendezvous of the ranks.

        Args:
            dataset: The value of `--dataset`.
            chat: The options of conversations.
            adapters: Whether only adapters are trained.
            batch_shares: The value of `--batch_shares`.

        Raises:
            UsageError: Options are incompatible.
        """
        kind = self.preference
        if not self.is_used:
            names = ("beta", "label_smoothing", "reference")
            refuse_ignored(self, names, "requires --preference", "--preference=none")
            return
        given = f"--preference={kind}"
        if batch_shares != "equal":
            raise UsageError(
                "--preference requires --batch_shares=equal, so that no pair is cut. Received: "
                f"--batch_shares={batch_shares}."
            )
        if not dataset.startswith(CHAT):
            raise UsageError(f"--preference requires --dataset=chat:FILE. Received: {given}.")
        if kind not in ("conservative", "robust"):
            why = "requires --preference=conservative or robust"
            refuse_ignored(self, ["label_smoothing"], why, given)
        if kind == "orpo":
            refuse_ignored(self, ["reference"], "is not supported with --preference=orpo", given)
        if self.reference == "base" and not adapters:
            raise UsageError(
                "--reference=base requires --lora_rank without --train_biases. Received: --reference=base. Use "
                "--reference=initial."
            )
        refuse_ignored(
            chat, ["packing", "loss_average"], "is not supported with --preference", given
        )

    def loss(self, vocabulary_size: int, chunk_size: int | None) -> Any:
        """The loss."""
        from tfdist.addons.hub.preferences.losses import PreferenceLoss

        return PreferenceLoss(
            vocabulary_size,
            kind=self.preference,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            chunk_size=chunk_size,
        )

    def referenced(
        self, pairs: Any, model: Any, backbone: Any, *, rows: int, chunk_size: int | None
    ) -> Any:
        """Pairs with log-probabilities by the reference model; every rank calls this.

        Args:
            pairs: The pairs.
            model: The model, in its initial state.
            backbone: Its backbone.
            rows: The rows of a global batch.
            chunk_size: The tokens whose logits are in memory at a time.
        """
        if self.preference == "orpo":
            return pairs
        from tfdist.addons.hub.preferences.reference import without_adapters

        if self.reference == "initial":
            found = _log_probabilities(pairs, model, rows, chunk_size)
        else:
            with without_adapters(backbone):
                found = _log_probabilities(pairs, model, rows, chunk_size)
        return dataclasses.replace(pairs, references=found)

    def agreement(self, pairs: Any, model: Any, *, rows: int, chunk_size: int | None) -> float:
        """The share of pairs whose chosen answer has gained more, relative to the reference."""
        found = _log_probabilities(pairs, model, rows, chunk_size) - pairs.references
        if self.preference in ("ipo", "orpo"):
            found = found / pairs.trained.sum(-1)
        return float((found[:, 0] > found[:, 1]).mean())


def _log_probabilities(pairs: Any, model: Any, rows: int, chunk_size: int | None) -> Any:
    """The log-probability of each answer: [pairs, 2]. Compiles the model for the pass."""
    from tfdist.addons.hub.preferences.losses import LogProbabilityLoss, Recorder
    from tfdist.addons.hub.preferences.reference import (
        compile_without_metrics,
        log_probabilities,
    )

    with model.distribute_strategy.scope():
        loss = LogProbabilityLoss(model.outputs[0].shape[-1], chunk_size=chunk_size)
        compile_without_metrics(model, loss=loss)
    recorder = Recorder(2 * len(pairs))
    found = log_probabilities(model, pairs.rows(rows), recorder, loss)
    return found.reshape(len(pairs), 2)
