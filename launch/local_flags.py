"""The flags of local steps: ranks that train apart, and average what they have learned."""

from __future__ import annotations

from tfdist.launch.flag_values import FlagDefiner, UsageError, as_given, refuse_ignored


class LocalFlags:
    """The flags that say how seldom ranks talk.

    Args:
        define: Defines them.

    Attributes:
        every: All of them.
    """

    def __init__(self, define: FlagDefiner):
        self._values = define.values
        self._sync_every = define.integer(
            "sync_every", None, "Steps of a rank by itself from one sync to the next", lower_bound=1
        )
        self._outer = define.enum(
            "outer", "diloco", ["diloco", "average", "slowmo"], "What a sync does"
        )
        self._fragments = define.integer(
            "fragments", 1, "diloco: parts of the parameters, in turn", lower_bound=1
        )
        self._overlap = define.integer(
            "overlap", 0, "diloco: steps for which a part travels", lower_bound=0
        )
        self._within = define.enum(
            "sync_within", "none", ["none", "host"], "host: every step inside of a host"
        )
        self.every = (self._sync_every, self._outer, self._fragments, self._overlap, self._within)

    @property
    def is_given(self) -> bool:
        """Whether ranks train apart."""
        return self._sync_every.value is not None

    def check(
        self, model: str, *, zero_stage: int, is_tpu: bool, has_servers: bool, divides_tables: bool
    ) -> None:
        """Looks at what can be known before the ranks meet.

        Args:
            model: The value of `--model`.
            zero_stage: That of `--zero_stage`.
            is_tpu: Whether a TPU is asked for.
            has_servers: Whether parameters are on servers.
            divides_tables: Whether the model's parameters lie in parts on the ranks.

        Raises:
            UsageError: Flags that do not go together.
        """
        given = as_given(self._values, [self._sync_every])
        if self._sync_every.value is None:
            refuse_ignored(self._values, self.every, "is for --sync_every", "no --sync_every")
            return
        if is_tpu:
            raise UsageError(f"--sync_every is for ranks. Received: {given} --strategy=tpu.")
        if has_servers:
            raise UsageError(
                f"--sync_every is for ranks, which have no parameter servers. Received: {given}."
            )
        if divides_tables:
            raise UsageError(
                f"--model={model} has tables that lie in parts on the ranks, which then need each other "
                f"at every step. Received: {given} --model={model}."
            )
        if zero_stage:
            raise UsageError(
                "Between two syncs each rank has an optimizer and parameters of its own, which ZeRO "
                f"divides. Received: {given} --zero_stage={zero_stage}."
            )
        if self._outer.value != "diloco":
            given = f"--outer={self._outer.value}"
            refuse_ignored(
                self._values, (self._fragments, self._overlap), "is for --outer=diloco", given
            )
        elif self._sync_every.value % self._fragments.value:
            raise UsageError(
                "--fragments must divide --sync_every. Received: "
                f"--fragments={self._fragments.value} {given}."
            )
        between = self._sync_every.value // self._fragments.value
        if self._overlap.value >= between:
            raise UsageError(
                f"--overlap must be less than --sync_every over --fragments, which is {between}. "
                f"Received: --overlap={self._overlap.value}."
            )

    def around(self, optimizer):
        """The optimizer that trains: that of a task, with what the flags put around it."""
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
