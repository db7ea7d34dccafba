"""The options of local steps, between which ranks synchronize their parameters."""

from __future__ import annotations

import dataclasses

from tfdist.launch.flags.options import names, option, refuse_ignored
from tfdist.launch.flags.values import UsageError


@dataclasses.dataclass(frozen=True)
class LocalSGDOptions:
    """The options of local steps; see the flags of the same names."""

    sync_every: int | None = option(None, "Local steps between synchronizations", least=1)
    outer: str = option("diloco", "Outer optimizer", choices=("diloco", "average", "slowmo"))
    fragments: int = option(1, "diloco: parts of the parameters to sync in turn", least=1)
    overlap: int = option(0, "diloco: steps that overlap with sending a part", least=0)
    sync_within: str = option(
        "none", "host: sync within hosts every step", choices=("none", "host")
    )

    @property
    def is_given(self) -> bool:
        """Whether ranks train with local steps."""
        return self.sync_every is not None

    def check(
        self, model: str, *, zero_stage: int, is_tpu: bool, has_servers: bool, divides_tables: bool
    ) -> None:
        """Check the options before the rendezvous of the ranks.

        Args:
            model: The value of `--model`.
            zero_stage: The value of `--zero_stage`.
            is_tpu: Whether a TPU is requested.
            has_servers: Whether parameters are on servers.
            divides_tables: Whether embedding tables are sharded over the ranks.

        Raises:
            UsageError: Options are incompatible.
        """
        if self.sync_every is None:
            refuse_ignored(self, names(self), "requires --sync_every", "without --sync_every")
            return
        given = f"--sync_every={self.sync_every}"
        if is_tpu:
            raise UsageError(
                f"--sync_every is not supported on a TPU. Received: {given} --strategy=tpu."
            )
        if has_servers:
            raise UsageError(
                f"--sync_every is not supported with parameter servers. Received: {given}."
            )
        if divides_tables:
            raise UsageError(
                f"--sync_every is not supported with --model={model}, whose tables are sharded over the "
                f"ranks. Received: {given} --model={model}."
            )
        if zero_stage:
            raise UsageError(
                "--sync_every requires --zero_stage=0, because ZeRO cannot shard state that differs between "
                f"ranks. Received: {given} --zero_stage={zero_stage}."
            )
        if self.outer != "diloco":
            of_diloco = ("fragments", "overlap")
            refuse_ignored(self, of_diloco, "requires --outer=diloco", f"--outer={self.outer}")
        elif self.sync_every % self.fragments:
            raise UsageError(
                "--sync_every must be a multiple of --fragments. Received: "
                f"--fragments={self.fragments} {given}."
            )
        between = self.sync_every // self.fragments
        if self.overlap >= between:
            raise UsageError(
                f"--overlap must be less than --sync_every divided by --fragments, which is {between}. "
                f"Received: --overlap={self.overlap}."
            )

    def around(self, optimizer):
        """Wrap the optimizer of a task by that of the options."""
        from tfdist.addons.slow_links import DiLoCo, LocalSGD, SlowMo

        if self.sync_every is None:
            return optimizer
        within = None if self.sync_within == "none" else self.sync_within
        if self.outer == "average":
            return LocalSGD(optimizer, self.sync_every, within=within)
        if self.outer == "slowmo":
            return SlowMo(optimizer, self.sync_every, within=within)
        return DiLoCo(
            optimizer,
            self.sync_every,
            fragments=self.fragments,
            overlap=self.overlap,
            within=within,
        )
