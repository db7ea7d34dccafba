"""The flags of `tfdist-plan` that describe a model and a machine."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdist.addons.planner import DEVICES, Machine, Transformer, machine
from tfdist.addons.planner.calibration import read_machine
from tfdist.launch.flags.model_sizes import LONG, file_or_name, is_preset, sizes_of
from tfdist.launch.flags.values import (
    MOST_RANKS,
    MOST_RANKS_OF_A_HOST,
    FlagDefiner,
    UsageError,
    as_given,
    refuse,
    refuse_ignored,
)
from tfdist.utils.quantities import read_bytes

_MOST = 1 << 24


class ModelFlags:
    """The flags of a model.

    Args:
        define: The definer of the program's flags.

    Attributes:
        sizes: The flags of the model's sizes.
        preset: The flag of a known model, or of a file.
    """

    def __init__(self, define: FlagDefiner):
        self._values = define.values

        def size(name: str, default: int | None, text: str):
            return define.integer(name, default, text, lower_bound=1, upper_bound=_MOST)

        self.preset = define.string(
            "preset", None, "Preset of KerasHub, config.json, or a known model: llama3-8b"
        )
        self._length = size("seq_length", None, "Tokens of a sample [the preset's; 2048]")
        self.sizes = (
            size("layers", 12, "Transformer blocks"),
            size("width", 768, "Width of the residual stream"),
            size("heads", 12, "Attention heads of a block"),
            size("kv_heads", None, "Key/value heads [heads]"),
            size("hidden", None, "Hidden units of a block [4 width]"),
            size("vocabulary", 50_257, "Size of the vocabulary"),
            size("experts", None, "Experts of a block [dense]"),
            size("top_k", 2, "Experts per token"),
        )

    def model(self) -> Transformer:
        """The model of the flags.

        Raises:
            UsageError: Flags are incompatible, or a file is not a configuration.
        """
        if self.preset.value is None:
            sizes = {flag.name: flag.value for flag in self.sizes}
            try:
                # As `tfdist-train --model=gpt` builds it.
                length = self._length.value or 2048
                return Transformer(
                    **sizes, length=length, learned_positions=False, blockwise=length >= LONG
                )
            except ValueError as error:
                given = as_given(self._values, self.sizes)
                raise UsageError(f"{given} is not supported: {error}") from None
        given = f"--preset={self.preset.value}"
        refuse_ignored(self._values, self.sizes, "cannot be combined with --preset", given)
        sizes = sizes_of("preset", self.preset.value, self._length.value)
        return dataclasses.replace(sizes, blockwise=sizes.length >= LONG)

    @property
    def is_kerashub_preset(self) -> bool:
        """Whether the flags name a preset of KerasHub, with its weights."""
        return self.preset.value is not None and is_preset(self.preset.value)

    def command(self, model: Transformer) -> list[str]:
        """The command that trains the model: the program and its flags of the model."""
        length = f"--seq_length={model.length}"
        if self.is_kerashub_preset:
            return ["tfdist-finetune", f"--preset={self.preset.value}", length]
        if self.preset.value is not None:
            return ["tfdist-train", "--model=gpt", f"--config={self.preset.value}", length]
        sizes = [f"--{flag.name}={flag.value}" for flag in self.sizes if flag.value is not None]
        if model.experts is None:
            sizes = [each for each in sizes if not each.startswith("--top_k=")]
        return ["tfdist-train", "--model=gpt", *sizes, length]


class MachineFlags:
    """The flags of a machine.

    Args:
        define: The definer of the program's flags.

    Attributes:
        flags: All of the flags.
    """

    def __init__(self, define: FlagDefiner):
        self._values = define.values
        self._machine = define.string(
            "machine", "a100", "File of `tfdist-plan calibrate`, or a device: a100, h100, tpu-v5p"
        )
        self.ranks = define.integer(
            "ranks", None, "Ranks of the job", lower_bound=1, upper_bound=MOST_RANKS
        )
        self._hosts = define.integer(
            "hosts", None, "Hosts of the ranks", lower_bound=1, upper_bound=MOST_RANKS
        )
        self._memory = define.string("memory", None, "Memory per rank: 80GiB [the machine's]")
        self.flags = (self._machine, self.ranks, self._hosts, self._memory)

    def machine(self) -> tuple[Machine, int]:
        """The machine, and the number of ranks.

        Raises:
            UsageError: Flags are incompatible, or a file is not a calibration.
        """
        name = self._machine.value
        path = file_or_name("machine", name, DEVICES)
        try:
            found = machine(name) if path is None else read_machine(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"--machine={name} cannot be used: {error}") from None
        changes: dict[str, Any] = {}
        if self._memory.value is not None:
            try:
                changes["memory"] = float(read_bytes(self._memory.value))
            except ValueError:
                raise refuse("memory", self._memory.value, "a size such as 80GiB or 24GB") from None
        hosts, ranks = self._hosts.value, self.ranks.value
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
