"""The roll call itself, without ranks: its two ends in one process."""

from __future__ import annotations

import threading

from tfdist.monitoring.roll_call import Keeper, Member, Report


def test_a_report_that_comes_after_the_goodbye_is_not_sent():
    keeper = Keeper(1, "token", timeout=60.0)
    asked, go_on = threading.Event(), threading.Event()

    def report():
        if threading.current_thread().name == "tfdist-watchdog":
            asked.set()
            go_on.wait(10.0)
        return Report(0)

    verdicts: list[str] = []
    member = Member(
        0,
        ("127.0.0.1", keeper.port),
        "token",
        60.0,
        report=report,
        on_verdict=verdicts.append,
        on_warning=verdicts.append,
    )
    assert asked.wait(10.0)
    member.close()
    go_on.set()
    seen_out = threading.Thread(target=keeper.see_out, daemon=True)
    seen_out.start()
    seen_out.join(10.0)
    assert not seen_out.is_alive()
    assert not verdicts
