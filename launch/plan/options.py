"""The options of `tfdist-plan` that describe a model and a machine."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdist.addons.planner import DEVICES, Machine, Transformer, machine
from tfdist.addons.planner.calibration import read_machine
from tfdist.addons.planner.machines import STEPS
from tfdist.addons.planner.quantities import read_bytes
from tfdist.launch.flags.model_sizes import LONG, file_or_name, is_preset, sizes_of
from tfdist.launch.flags.options import as_given, option, refuse_ignored
from tfdist.launch.flags.values import MOST_RANKS, MOST_RANKS_OF_A_HOST, UsageError, refuse

_MOST = 1 << 24
#: The options of the model's sizes, which a preset has too.
SIZES = ("layers", "width", "heads", "kv_heads", "hidden", "vocabulary", "experts", "top_k")


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The options of a model; see the flags of the same names."""

    preset: str | None = option(
        None, "Preset of KerasHub, config.json, or a known model: llama3-8b"
    )
    seq_length: int | None = option(
        None, "Tokens of a sample [the preset's; 2048]", least=1, most=_MOST
    )
    layers: int = option(12, "Transformer blocks", least=1, most=_MOST)
    width: int = option(768, "Width of the residual stream", least=1, most=_MOST)
    heads: int = option(12, "Attention heads of a block", least=1, most=_MOST)
    kv_heads: int | None = option(None, "Key/value heads [heads]", least=1, most=_MOST)
    hidden: int | None = option(None, "Hidden units of a block [4 width]", least=1, most=_MOST)
    vocabulary: int = option(50_257, "Size of the vocabulary", least=1, most=_MOST)
    experts: int | None = option(None, "Experts of a block [dense]", least=1, most=_MOST)
    top_k: int = option(2, "Experts per token", least=1, most=_MOST)

    def model(self) -> Transformer:
        """The model of the options.

        Raises:
            UsageError: Options are incompatible, or a file is not a configuration.
        """
        if self.preset is None:
            sizes = {name: getattr(self, name) for name in SIZES}
            try:
                # As `tfdist-train --model=gpt` builds it.
                length = self.seq_length or 2048
                return Transformer(
                    **sizes, length=length, learned_positions=False, blockwise=length >= LONG
                )
            except ValueError as error:
                given = as_given(self, SIZES)
                raise UsageError(f"{given} is not supported: {error}") from None
        given = f"--preset={self.preset}"
        refuse_ignored(self, SIZES, "cannot be combined with --preset", given)
        found = sizes_of("preset", self.preset, self.seq_length)
        return dataclasses.replace(found, blockwise=found.length >= LONG)

    @property
    def is_kerashub_preset(self) -> bool:
        """Whether the options name a preset of KerasHub, with its weights."""
        return self.preset is not None and is_preset(self.preset)

    def command(self, model: Transformer) -> list[str]:
        """The command that trains the model: the program and its flags of the model."""
        length = f"--seq_length={model.length}"
        if self.is_kerashub_preset:
            return ["tfdist-finetune", f"--preset={self.preset}", length]
        if self.preset is not None:
            return ["tfdist-train", "--model=gpt", f"--config={self.preset}", length]
        found = {name: getattr(self, name) for name in SIZES}
        sizes = [f"--{name}={value}" for name, value in found.items() if value is not None]
        if model.experts is None:
            sizes = [each for each in sizes if not each.startswith("--top_k=")]
        return ["tfdist-train", "--model=gpt", *sizes, length]


@dataclasses.dataclass(frozen=True)
class MachineOptions:
    """The options of a machine; see the flags of the same names."""

    machine: str = option(
        "a100", "File of `tfdist-plan calibrate`, or a device: a100, h100, tpu-v5p"
    )
    ranks: int | None = option(None, "Ranks of the job", least=1, most=MOST_RANKS)
    hosts: int | None = option(None, "Hosts of the ranks", least=1, most=MOST_RANKS)
    memory: str | None = option(None, "Memory per rank: 80GiB [the machine's]")
    steps: str = option("compiled", "How steps of a GPU run", choices=tuple(STEPS))

    def read(self) -> tuple[Machine, int]:
        """The machine, and the number of ranks.

        Raises:
            UsageError: Options are incompatible, or a file is not a calibration.
        """
        name = self.machine
        path = file_or_name("machine", name, DEVICES)
        if path is not None:
            refuse_ignored(self, ["steps"], "requires a device as --machine", f"--machine={name}")
        try:
            found = machine(name, steps=self.steps) if path is None else read_machine(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"--machine={name} cannot be used: {error}") from None
        changes: dict[str, Any] = {}
        if self.memory is not None:
            try:
                changes["memory"] = float(read_bytes(self.memory))
            except ValueError:
                raise refuse("memory", self.memory, "a size such as 80GiB or 24GB") from None
        hosts, ranks = self.hosts, self.ranks
        if ranks is None:
            ranks = (hosts or 1) * found.ranks_per_host
        if hosts is not None:
            if ranks % hosts or ranks // hosts > MOST_RANKS_OF_A_HOST:
                raise UsageError(
                    f"--ranks must be a multiple of --hosts, with at most {MOST_RANKS_OF_A_HOST:,} per "
                    f"host. Received: --ranks={ranks} --hosts={hosts}."
                )
            changes["ranks_per_host"] = ranks // hosts
        return found.replace(**changes), ranks
