"""The options of `tfdist-finetune`, and their checks."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from tfdist.launch.finetune.chat import ChatOptions
from tfdist.launch.finetune.preferences import PreferenceOptions
from tfdist.launch.flags.checkpoint import CheckpointOptions
from tfdist.launch.flags.mesh import Layout, MeshOptions
from tfdist.launch.flags.optimizer import PresetOptimizerOptions, read_recompute
from tfdist.launch.flags.options import option, refuse_ignored
from tfdist.launch.flags.values import UsageError, data_folder, folder, refuse
from tfdist.launch.train.corpus import check_source
from tfdist.launch.train.world import StrategyOptions

_MOST = 1 << 20
#: The name of the adapter in the folder of `--output`.
ADAPTER = "adapter.lora.h5"
#: The formats of `--export`, and their folders in that of `--output`.
EXPORTS = ("hf", "peft")
#: The begin of an address at Hugging Face.
HUB = "hf://"
#: Windows per step, rounded up to what the ranks can split, unless the user sets it.
BATCH_SIZE = 8


@dataclasses.dataclass(frozen=True)
class FinetuneOptions:
    """The options of the program; see the flags of the same names, and the options of each subject."""

    preset: str | None = option(
        None,
        "Folder of a KerasHub preset or a model of Hugging Face, with its tokenizer; or "
        "hf://organization/name",
    )
    dataset: str = option(
        "pydoc", "chat:FILE (JSON lines), text:FILE, tfds:NAME, tfds:NAME/FEATURE or pydoc"
    )
    data_dir: str | None = option(None, "Folder of the TFDS datasets")
    lora_rank: int = option(0, "Rank of LoRA adapters; 0: all weights", least=0, most=_MOST)
    train_biases: bool = option(
        False, "Train biases of layers with adapters too; KerasHub cannot load them"
    )
    quantize: str = option(
        "none", "Quantization of the frozen weights", choices=("none", "int8", "int4")
    )
    block_size: int = option(128, "Inputs that share a scale with int4", least=1, most=_MOST)
    seq_length: int = option(128, "Tokens per window of text", least=1, most=_MOST)
    batch_size: int | None = option(
        None, "Windows per step on all ranks", least=1, most=_MOST, shown=BATCH_SIZE
    )
    epochs: int = option(1, "Epochs to train", least=1)
    learning_rate: float = option(2e-4, "Highest learning rate", least=1e-9, most=1000.0)
    loss_chunk: int = option(
        1024, "Tokens whose logits are in memory at a time; 0: all", least=0, most=_MOST
    )
    prompt: str | None = option(None, "Prompt for a sample of the tuned model")
    output: str | None = option(
        None, f"Folder of the result: {ADAPTER} or a preset, and those of --export"
    )
    export: tuple[str, ...] = option(
        (),
        "hf: merged weights for transformers and vLLM, in OUTPUT/hf; peft: an adapter, in OUTPUT/peft",
    )
    verify_with: str | None = option(
        None,
        "Python with transformers, which must compute the model's logits from each export [this one, if it has "
        "transformers]",
    )
    patience: int = option(
        0, "Epochs without a lower validation loss before training ends; 0: no end", least=0
    )
    seed: int = option(0, "Seed of adapters and data order", least=0, most=2**32 - 1)
    threads: int = option(0, "Threads per rank; 0: TensorFlow's choice", least=0, most=4096)
    verbose: int = option(2, "0: silent, 1: progress bar, 2: one line per epoch", least=0, most=2)
    recompute: str = option(
        "none", "none, selective, sqrt, every_layer, optimal, or bytes to store: budget:2GiB"
    )
    chat: ChatOptions = dataclasses.field(default_factory=ChatOptions)
    preferences: PreferenceOptions = dataclasses.field(default_factory=PreferenceOptions)
    optimizer: PresetOptimizerOptions = dataclasses.field(default_factory=PresetOptimizerOptions)
    checkpoints: CheckpointOptions = dataclasses.field(default_factory=CheckpointOptions)
    mesh: MeshOptions = dataclasses.field(default_factory=MeshOptions)
    world: StrategyOptions = dataclasses.field(default_factory=StrategyOptions)

    @property
    def chunk_size(self) -> int | None:
        """The tokens whose logits are in memory at a time; None for all."""
        return self.loss_chunk or None

    def _check_export(self) -> None:
        for kind in self.export:
            if kind not in EXPORTS:
                raise refuse("export", ",".join(self.export), f"some of {', '.join(EXPORTS)}")
        if self.output is None:
            refuse_ignored(self, ["export"], "requires --output", "no --output")
        if "peft" in self.export and not self.lora_rank:
            raise UsageError(
                "--export=peft requires --lora_rank. Received: --lora_rank=0. Use --export=hf for whole "
                "weights."
            )
        if "peft" in self.export and self.train_biases:
            raise UsageError(
                "--export=peft is not supported with --train_biases, which an adapter of PEFT does not "
                "have. Use --export=hf. Received: both."
            )

        if not self.export:
            refuse_ignored(self, ["verify_with"], "requires --export", "no --export")
        if self.verify_with is not None and shutil.which(self.verify_with) is None:
            raise refuse("verify_with", self.verify_with, "the interpreter of an environment")

    def check(self) -> Layout:
        """Check the options before the rendezvous of the ranks.

        Returns:
            The layout of the ranks.

        Raises:
            UsageError: Options are invalid or incompatible.
        """
        if self.preset is None:
            raise UsageError("--preset must be the folder of a KerasHub preset. Received: none.")
        place = Path(self.preset).expanduser()
        if not self.preset.startswith(HUB) and not (place / "config.json").is_file():
            what = "a folder without config.json" if place.is_dir() else "not a folder"
            raise UsageError(
                "--preset must be a folder of Hugging Face, one written by KerasHub's `save_to_preset`, or "
                "hf://organization/name. "
                f"Received: --preset={self.preset}, which is {what}."
            )
        self.chat.check(self.dataset)
        adapters = bool(self.lora_rank) and not self.train_biases
        self.preferences.check(
            self.dataset, self.chat, adapters=adapters, batch_shares=self.world.batch_shares
        )
        if self.prompt is None:
            refuse_ignored(self.chat, ["sample_every"], "requires --prompt", "no --prompt")
        if not self.dataset.startswith("chat:"):
            check_source(self.dataset)
        if not self.dataset.startswith("tfds:"):
            refuse_ignored(
                self, ["data_dir"], "requires --dataset=tfds:NAME", f"--dataset={self.dataset}"
            )
        elif self.data_dir is not None:
            data_folder("data_dir", self.data_dir)
        if self.quantize != "none" and not self.lora_rank:
            raise UsageError(
                "--quantize requires --lora_rank, because quantized weights are not trained. Received: "
                f"--quantize={self.quantize} --lora_rank=0."
            )
        if not self.lora_rank:
            refuse_ignored(self, ["train_biases"], "requires --lora_rank", "--lora_rank=0")
        if self.quantize != "int4":
            refuse_ignored(
                self, ["block_size"], "requires --quantize=int4", f"--quantize={self.quantize}"
            )
        if self.output is not None:
            folder("output", self.output)
        self._check_export()
        if self.world.is_tpu:
            raise UsageError("tfdist-finetune is not supported on a TPU. Received: --strategy=tpu.")
        layout = self.mesh.layout()
        self.world.check(layout, self.mesh)
        self.optimizer.check(is_tpu=False, has_sync=False)
        read_recompute("recompute", self.recompute)
        if layout.context > 1:
            raise UsageError(
                "--context is not supported for models of KerasHub. Received: "
                f"--context={layout.context}. Omit --context, or train --model=gpt with tfdist-train."
            )
        self.checkpoints.check(is_tpu=False)
        return layout
