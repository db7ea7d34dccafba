"""`tfdist-finetune` as users start it: alone and on ranks, from a preset that the example makes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.launch.processes import BIN, run

keras_hub = pytest.importorskip("keras_hub")

EXAMPLE = Path(__file__).parents[3] / "examples" / "make_preset.py"
RUN = [os.path.join(BIN, "tfdist-run"), "-np=2"]


@pytest.fixture(scope="module")
def preset(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("made") / "preset")
    sizes = ["--steps=40", "--width=32", "--layers=2", "--seq_length=32", "--vocabulary=400"]
    job = run([sys.executable, str(EXAMPLE), f"--output={folder}", *sizes])
    assert job.returncode == 0, job.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """A text with characters of several bytes, of which the cut may go through one."""
    file = tmp_path_factory.mktemp("text") / "text"
    file.write_text("Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. ☃\n" * 200)
    return f"--dataset=text:{file}"


def program(preset: str, text: str) -> list[str]:
    sizes = ["--seq_length=32", "--threads=1", "--learning_rate=0.01", "--batch_size=8"]
    return [os.path.join(BIN, "tfdist-finetune"), f"--preset={preset}", text, *sizes]


def perplexities(job) -> tuple[float, float, str]:
    """Before and after, and where it ran."""
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
    found = re.findall(
        r"Validation loss [\d.]+, perplexity ([\d.]+) before and ([\d.]+) after, .* tokens/s on (.*)\.",
        job.stdout,
    )
    assert len(found) == 1, job.stdout[-3000:]
    return float(found[0][0]), float(found[0][1]), found[0][2]


LAYOUTS = {
    "tensor": ["--tensor=2", "--lora_rank=4"],
    "zero": ["--zero_stage=3", "--lora_rank=4"],
    "pipeline": ["--pipeline=2", "--lora_rank=4"],
    "int8": ["--tensor=2", "--lora_rank=4", "--quantize=int8"],
    "int4": ["--zero_stage=3", "--lora_rank=4", "--quantize=int4"],
    "int4 in blocks": ["--tensor=2", "--lora_rank=4", "--quantize=int4", "--block_size=16"],
    "whole": ["--tensor=2"],
    "biases": ["--tensor=2", "--lora_rank=4", "--train_biases"],
    "logits": ["--tensor=2", "--lora_rank=4", "--loss_chunk=0"],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_learn_what_one_process_learns(preset, text, layout, tmp_path):
    flags = LAYOUTS[layout]
    alone = run([*program(preset, text), *(flag for flag in flags if "=2" not in flag)])
    before, after, where = perplexities(alone)
    assert where == "1 rank(s) of LocalStrategy"
    assert after < 0.98 * before
    ranks = perplexities(run([*RUN, "--", *program(preset, text), *flags]))
    assert ranks[:2] == pytest.approx((before, after), rel=2e-3)
    assert ranks[2].startswith("2 rank(s)")


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_the_adapter_is_one_of_plain_keras_hub(preset, text, tmp_path, axis):
    output = tmp_path / "tuned"
    flags = [f"--{axis}=2", "--lora_rank=4", "--prompt=Zwölf", f"--output={output}"]
    job = run([*RUN, "--", *program(preset, text), *flags])
    before, after, where = perplexities(job)
    assert after < 0.98 * before and f"{axis} 2" in where
    assert "Zwölf" in job.stdout
    # Biases stay: an adapter without them is the whole of what was trained.
    assert "plain KerasHub does not" not in job.stdout
    with h5py.File(output / "adapter.lora.h5") as file:
        assert list(file) == ["lora"]
    model = keras_hub.models.CausalLM.from_preset(preset)
    model.backbone.enable_lora(4)
    model.backbone.load_lora_weights(str(output / "adapter.lora.h5"))
    model.preprocessor.sequence_length = 32
    words = Path(text.partition("text:")[2]).read_text()[-2000:]
    tokens = np.array(model.preprocessor.tokenizer(words))
    rows = tokens[: len(tokens) // 33 * 33].reshape(-1, 33)
    x = {"token_ids": rows[:, :-1], "padding_mask": np.ones_like(rows[:, :-1])}
    model.preprocessor = None
    loss = model.evaluate(x, rows[:, 1:], verbose=0)[0]
    assert np.exp(loss) == pytest.approx(after, rel=0.2)


@pytest.mark.slow
def test_biases_train_where_that_is_asked_for(preset, text, tmp_path):
    """Their adapter says so, in one line of the chief."""
    flags = ["--tensor=2", "--lora_rank=4", "--train_biases", f"--output={tmp_path}"]
    job = run([*RUN, "--", *program(preset, text), *flags])
    perplexities(job)
    # `tfdist-run` prints what its ranks say on its own stdout.
    told = [line for line in job.stdout.splitlines() if "plain KerasHub does not" in line]
    assert len(told) == 1 and told[0].startswith("[0]") and "/bias`" in told[0], job.stdout
    with h5py.File(tmp_path / "adapter.lora.h5") as file:
        assert set(file) == {"lora", "tfdist"}


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_whole_model_is_saved_as_a_preset(preset, text, tmp_path, axis):
    job = run([*RUN, "--", *program(preset, text), f"--{axis}=2", f"--output={tmp_path / 'new'}"])
    _, after, _ = perplexities(job)
    again = run([*program(str(tmp_path / "new"), text), "--epochs=1"])
    assert perplexities(again)[0] == pytest.approx(after, rel=1e-3)


@pytest.mark.slow
def test_a_training_goes_on_in_its_workdir(preset, text, tmp_path):
    flags = [f"--workdir={tmp_path / 'work'}", "--lora_rank=4", "--tensor=2"]
    perplexities(run([*RUN, "--", *program(preset, text), *flags]))
    job = run([*RUN, "--", *program(preset, text), *flags, "--epochs=2"])
    _, after, _ = perplexities(job)
    assert "Epoch 2/2" in job.stdout and "Epoch 1/2" not in job.stdout
    whole = run([*RUN, "--", *program(preset, text), "--lora_rank=4", "--tensor=2", "--epochs=2"])
    # The schedule of a run of two epochs differs, in the first.
    assert after == pytest.approx(perplexities(whole)[1], rel=0.3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--preset must be the folder"),
        (["--preset=/nowhere"], "--preset=/nowhere, which is not a folder"),
        (["--preset=/tmp"], "a folder without config.json"),
        (["--dataset=books"], "--dataset=books"),
        (["--dataset=text:/nowhere"], "--dataset=text:/nowhere does not exist"),
        (["--data_dir=/tmp"], "--data_dir requires --dataset=tfds:NAME"),
        (["--quantize=int8"], "requires --lora_rank"),
        (["--block_size=8", "--lora_rank=4"], "--block_size requires --quantize=int4"),
        (["--train_biases"], "--train_biases requires --lora_rank"),
        (["--strategy=tpu"], "not supported on a TPU"),
        (["--batch_size=0"], "batch_size"),
        (["--output=/"], "--output"),
    ],
)
def test_a_bad_flag_is_one_line(preset, flags, words):
    given = [] if not flags or flags[0].startswith("--preset") else [f"--preset={preset}"]
    job = run([os.path.join(BIN, "tfdist-finetune"), *given, *flags], timeout=60)
    assert job.returncode == 2
    assert words in job.stderr and len(job.stderr.strip().splitlines()) == 1, job.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param(
            ["--seq_length=100000", "--batch_size=1"], "--seq_length", marks=pytest.mark.slow
        ),
        pytest.param(["--batch_size=5000"], "--batch_size=5000", marks=pytest.mark.slow),
        (["--dataset=text:/bin/true"], "not UTF-8 text"),
        pytest.param(
            ["--dataset=tfds:digits"], "does not have a text feature `text`", marks=pytest.mark.slow
        ),
        pytest.param(["--dataset=tfds:digitz"], "Did you mean 'digits'?", marks=pytest.mark.slow),
    ],
)
def test_what_is_known_later_is_one_line(preset, text, flags, words):
    job = run([*program(preset, text), *flags])
    assert job.returncode == 2, job.stderr
    assert words in job.stderr.strip().splitlines()[-1], job.stderr
