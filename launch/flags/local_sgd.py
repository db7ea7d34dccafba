"""The flags of local steps, between which ranks synchronize their parameters."""

from __future__ import annotations

from tfdist.launch.flags.values import FlagDefiner, UsageError, as_given, refuse_ignored


class LocalFlags:
    """The flags of local steps.

    Args:
        define: The definer of the program's flags.

    Attributes:
        every: All of the flags.
    """

    def __init__(self, define: FlagDefiner):
        self._values = define.values
        self._sync_every = define.integer(
            "sync_every", None, "Local steps between synchronizations", lower_bound=1
        )
        self._outer = define.enum(
            "outer", "diloco", ["diloco", "average", "slowmo"], "Outer optimizer"
        )
        self._fragments = define.integer(
            "fragments", 1, "diloco: parts of the parameters to sync in turn", lower_bound=1
        )
        self._overlap = define.integer(
            "overlap", 0, "diloco: steps that overlap with sending a part", lower_bound=0
        )
        self._within = define.enum(
            "sync_within", "none", ["none", "host"], "host: sync within hosts every step"
        )
        self.every = (self._sync_every, self._outer, self._fragments, self._overlap, self._within)

    @property
    def is_given(self) -> bool:
        """Whether ranks train with local steps."""
        return self._sync_every.value is not None

    def check(
        self, model: str, *, zero_stage: int, is_tpu: bool, has_servers: bool, divides_tables: bool
    ) -> None:
        """Check the flags before the rendezvous of the ranks.

        Args:
            model: The value of `--model`.
            zero_stage: The value of `--zero_stage`.
            is_tpu: Whether a TPU is requested.
            has_servers: Whether parameters are on servers.
            divides_tables: Whether embedding tables are sharded over the ranks.

        Raises:
            UsageError: Flags are incompatible.
        """
        given = as_given(self._values, [self._sync_every])
        if self._sync_every.value is None:
            refuse_ignored(
                self._values, self.every, "requires --sync_every", "without --sync_every"
            )
            return
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
        if self._outer.value != "diloco":
            given = f"--outer={self._outer.value}"
            refuse_ignored(
                self._values, (self._fragments, self._overlap), "requires --outer=diloco", given
            )
        elif self._sync_every.value % self._fragments.value:
            raise UsageError(
                "--sync_every must be a multiple of --fragments. Received: "
                f"--fragments={self._fragments.value} {given}."
            )
        between = self._sync_every.value // self._fragments.value
        if self._overlap.value >= between:
            raise UsageError(
                f"--overlap must be less than --sync_every divided by --fragments, which is {between}. "
                f"Received: --overlap={self._overlap.value}."
            )

    def around(self, optimizer):
        """Wrap the optimizer of a task by that of the flags."""
        from tfdist.addons.slow_links import DiLoCo, LocalSGD, SlowMo

        sync_every = self._sync_every.value
        if sync_every is None:
            return optimizer
        within = None if self._within.value == "none" else self._within.value
        if self._outer.value == "average":
            return LocalSGD(optimizer, sync_every, within=within)
        if self._outer.value == "slowmo":
            return SlowMo(optimizer, sync_every, within=within)
        return DiLoCo(
            optimizer,
            sync_every,
            fragments=self._fragments.value,
            overlap=self._overlap.value,
            within=within,
        )
