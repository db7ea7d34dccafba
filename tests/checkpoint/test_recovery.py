"""What a training says of its checkpoints before it begins, and of the way back."""

from __future__ import annotations

import re

import pytest

from tests.checkpoint import resume_programs

Recovery = pytest.importorskip("tfdist.addons.monitoring.recovery").Recovery


def said_of(folder: str, interrupt: int | None, down_seconds: float) -> str:
    """What a training prints that saves every 4 steps, and ends before a step."""
    import contextlib
    import io
    import os
    import time
    from unittest import mock

    import keras

    from tfdist.callbacks import Checkpointer
    from tfdist.runtime.recovery import FAILED_AT

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    model = resume_programs.perceptron({"data": 1})
    model, data = model
    callbacks: list = [Checkpointer(folder, every_steps=4, keep_last=2)]
    if interrupt is not None:
        callbacks.append(resume_programs.Interrupt(interrupt))
    said = io.StringIO()
    failed = {FAILED_AT: str(time.time() - down_seconds)}
    with (
        contextlib.redirect_stdout(said),
        mock.patch.dict(os.environ, failed),
        # Where a training stood is noted once a second.
        mock.patch("tfdist.checkpoint.checkpointer._AGREE_SECONDS", 0.0),
        contextlib.suppress(resume_programs.Interruption),
    ):
        model.fit(*data, batch_size=12, epochs=1, verbose=2, callbacks=callbacks)
    return said.getvalue()


def test_what_is_said(one_process, tmp_path):
    folder = str(tmp_path)
    (first,) = one_process.run(said_of, folder, 7, 5.0)
    assert "Recovered" not in first
    room = r"A checkpoint takes ([\d.]+) KiB, the 2 that are kept and one that is being written ([\d.]+) KiB; [\d.]+ [GT]iB are free in "
    size, three = re.search(room, first).groups()
    # 16 * 9 + 16 + 4 * 16 + 16 * 5 + 5 parameters and two moments of those that are trained.
    assert float(size) == pytest.approx(3.4, abs=0.3)
    assert float(three) == pytest.approx(3 * float(size), rel=0.01)
    assert Recovery(folder).read() == 7
    (second,) = one_process.run(said_of, folder, None, 5.0)
    total, *parts = re.search(
        r"Recovered in ([\d.]+) s: ([\d.]+) start, ([\d.]+) load, ([\d.]+) replay\.", second
    ).groups()
    assert float(total) == pytest.approx(sum(map(float, parts)), abs=0.2)
    assert 5.0 <= float(parts[0]) < 60
    # It is said when steps 4 to 6 were done again, not in the end.
    assert second.index("Recovered") < second.index("10/10")


def test_progress_is_what_it_is(tmp_path):
    progress = Recovery(str(tmp_path))
    assert progress.read() == 0
    for text in ("", "[]", '{"step": "a"}', '{"step": true}', "\xff" * 9):
        (tmp_path / "progress.json").write_text(text)
        assert progress.read() == 0
    progress.write(17)
    assert progress.read() == 17
    # A link leads nowhere.
    (tmp_path / "other").write_text("kept")
    (tmp_path / "progress.json.new").symlink_to(tmp_path / "other")
    progress.write(18)
    assert (tmp_path / "other").read_text() == "kept"
