"""`tfdist-finetune` on conversations and preferences, from a folder of Hugging Face to another one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.launch.processes import BIN, run

pytest.importorskip("keras_hub")
pytest.importorskip("safetensors")

TRANSFORMERS = Path(__file__).parents[3] / ".peers" / "torch" / "bin" / "python"
PROGRAM = os.path.join(BIN, "tfdist-finetune")
RUN = [os.path.join(BIN, "tfdist-run"), "-np=2"]
TOKENIZER = Path(__file__).parents[2] / "addons" / "hub" / "chat" / "tokenizer.json"
MAKE = """
import sys
import keras, keras_hub
keras.utils.set_random_seed(3)
sizes = dict(num_layers=2, num_query_heads=4, num_key_value_heads=2, hidden_dim=64, intermediate_dim=128)
backbone = keras_hub.models.Llama3Backbone(vocabulary_size=320, **sizes)
task = keras_hub.models.Llama3CausalLM(backbone=backbone, preprocessor=None)
import tfdist
task.export_to_transformers(sys.argv[1])
"""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWERS = {"one": "two", "two": "three", "three": "four", "four": "five", "six": "seven"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("made") / "model"
    job = run([sys.executable, "-c", MAKE, str(place)])
    assert job.returncode == 0, job.stderr[-3000:]
    (place / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    (place / "chat_template.jinja").write_text(TEMPLATE)
    return place


@pytest.fixture(scope="module")
def conversations(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "chat.jsonl"
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"after {asked}"},
                {"role": "assistant", "content": answer},
            ]
        }
        for asked, answer in ANSWERS.items()
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines * 16))
    return file


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    lines = [
        {"prompt": f"after {asked}", "chosen": f" {answer}", "rejected": f" {answer[::-1]}"}
        for asked, answer in ANSWERS.items()
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines * 8))
    return file


def command(folder: Path, data: Path) -> list[str]:
    return [
        *(PROGRAM, f"--preset={folder}", f"--dataset=chat:{data}", "--seq_length=64"),
        *("--threads=1", "--learning_rate=0.01", "--batch_size=8"),
    ]


def told(job) -> tuple[float, float]:
    """The perplexity before and after."""
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
    found = re.findall(r"perplexity ([\d.]+) before and ([\d.]+) after", job.stdout)
    assert len(found) == 1, job.stdout[-3000:]
    return float(found[0][0]), float(found[0][1])


LAYOUTS = {
    "tensor": ["--tensor=2"],
    "data": [],
    "zero": ["--zero_stage=3"],
    "pipeline": ["--pipeline=2"],
    "accumulated": ["--tensor=2", "--accumulate=2"],
    "int8": ["--tensor=2", "--quantize=int8"],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_learn_what_one_process_learns(folder, conversations, layout):
    flags = [*command(folder, conversations), "--packing", "--lora_rank=4"]
    own = LAYOUTS[layout]
    alone = run([*flags, *(flag for flag in own if "=2" not in flag or "accum" in flag)])
    before, after = told(alone)
    assert after < 0.95 * before
    assert told(run([*RUN, "--", *flags, *own])) == pytest.approx((before, after), rel=2e-3)


@pytest.mark.slow
def test_packing_learns_the_same_in_fewer_rows(folder, conversations):
    """One step of all conversations, with and without."""
    flags = [*command(folder, conversations)[:-1], "--batch_size=80", "--epochs=3"]
    apart, packed = run(flags), run([*flags, "--packing"])
    assert told(packed) == pytest.approx(told(apart), rel=1e-3)
    assert "instead of" in packed.stdout and "instead of" not in apart.stdout


def test_the_whole_job(folder, conversations, tmp_path):
    """From a folder of Hugging Face, through chat data, to a folder and a conversation with it."""
    output = tmp_path / "out"
    flags = [
        *("--tensor=2", "--packing", "--epochs=16", "--show=1"),
        *("--prompt=after two", "--sample_every=8"),
        *(f"--output={output}", "--export=hf"),
    ]
    job = run([*RUN, "--", *command(folder, conversations), *flags], timeout=240)
    before, after = told(job)
    assert after < before / 3, job.stdout
    assert "> " in job.stdout and "trained (>)" in job.stdout
    assert "Epoch 8 answers:" in job.stdout and "Epoch 16 answers: three" in job.stdout
    assert re.search(r"writes:\n(\[0\] )?three", job.stdout), job.stdout
    files = {file.name for file in (output / "hf").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files
    talk = subprocess.run(
        [PROGRAM, "chat", str(output / "hf"), "--seq_length=64"],
        input="after one\n\n/new\nafter six\n",
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        check=False,
    )
    assert talk.stdout.splitlines() == ["two", "seven"], talk.stderr[-2000:]


@pytest.mark.slow
def test_adapters_leave_in_each_format(folder, conversations, tmp_path):
    flags = ["--tensor=2", "--lora_rank=4", "--quantize=int8", f"--output={tmp_path}"]
    told(run([*RUN, "--", *command(folder, conversations), *flags, "--export=peft,hf"]))
    assert (tmp_path / "adapter.lora.h5").exists()
    assert {file.name for file in (tmp_path / "peft").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert (tmp_path / "hf" / "tokenizer.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data", "tensor", "zero", "pipeline"])
def test_transformers_verifies_each_export(folder, conversations, tmp_path, layout):
    if not TRANSFORMERS.exists():
        pytest.skip("transformers is not installed: `make peers` makes its environment.")
    flags = [
        *(*command(folder, conversations), *LAYOUTS[layout], "--lora_rank=4", "--packing"),
        *(f"--output={tmp_path}", "--export=hf,peft", f"--verify_with={TRANSFORMERS}"),
    ]
    job = run([*RUN, "--", *flags], timeout=300)
    told(job)
    found = re.findall(r"(hf|peft) \(transformers: its logits, within (\S+)\)", job.stdout)
    assert [kind for kind, _ in found] == ["hf", "peft"], job.stdout
    assert all(float(apart) < 1e-5 for _, apart in found), found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "orpo"])
@pytest.mark.parametrize("layout", ["tensor", "zero", "pipeline"])
def test_preferences(folder, pairs, kind, layout):
    flags = [*command(folder, pairs), f"--preference={kind}", "--lora_rank=4", "--epochs=3"]
    found = []
    for job in (run(flags), run([*RUN, "--", *flags, *LAYOUTS[layout]])):
        assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
        numbers = re.search(
            r"Validation loss ([\d.]+) before and ([\d.]+) after; .* in ([\d.]+)%", job.stdout
        )
        assert numbers, job.stdout
        found.append([float(each) for each in numbers.groups()])
    assert found[1] == pytest.approx(found[0], rel=2e-3)
    assert found[0][1] < found[0][0]
    assert kind == "orpo" or found[0][2] > 90


def adapters(output: Path) -> dict[str, np.ndarray]:
    """The values of an adapter file, by name."""
    found: dict[str, np.ndarray] = {}

    def keep(name, value):
        if isinstance(value, h5py.Dataset):
            found[name] = value[()]

    (file,) = output.glob("*.lora.h5")
    with h5py.File(file) as opened:
        opened.visititems(keep)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "dpo"])
def test_a_killed_job_goes_on_in_the_middle_of_its_data(
    folder, conversations, pairs, tmp_path, kind
):
    flags = {
        "packed": [*command(folder, conversations), "--packing", "--batch_size=2", "--epochs=4"],
        "dpo": [*command(folder, pairs), "--preference=dpo", "--batch_size=4", "--epochs=3"],
    }[kind]
    job = [*RUN, "--", *flags, "--lora_rank=4", "--tensor=2"]
    whole = run([*job, f"--output={tmp_path / 'whole'}"])
    assert whole.returncode == 0, whole.stdout[-3000:] + whole.stderr[-3000:]
    steps = int(re.findall(r"(\d+)/\1", whole.stdout)[-1])
    # In the middle of the second epoch.
    wanted, work = steps + steps // 2, tmp_path / "work"
    again = [*job, "--save_every=1", f"--workdir={work}", f"--output={tmp_path / 'again'}"]
    with subprocess.Popen(again, start_new_session=True, stdout=subprocess.DEVNULL) as killed:
        deadline = time.monotonic() + 120
        while max([0, *(int(step.name.split("-")[1]) for step in work.glob("step-*"))]) < wanted:
            assert killed.poll() is None and time.monotonic() < deadline, list(work.glob("*"))
            time.sleep(0.01)
        os.killpg(killed.pid, signal.SIGKILL)
    rest = run(again)
    assert rest.returncode == 0, rest.stdout[-3000:] + rest.stderr[-3000:]
    assert "Epoch 1/" not in rest.stdout
    expected, found = adapters(tmp_path / "whole"), adapters(tmp_path / "again")
    assert expected and expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.slow
def test_pairs_on_three_ranks(folder, pairs):
    """No rank has a half of a pair; the 4 pairs of validation have two of padding."""
    flags = [*command(folder, pairs)[:-1], "--preference=dpo", "--lora_rank=4"]
    ranks = [RUN[0], "-np=3", "--"]
    jobs = [run([*flags, "--batch_size=6"]), run([*ranks, *flags, "--batch_size=6"])]
    found = []
    for job in jobs:
        assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
        found.append(re.findall(r"Validation loss ([\d.]+) before and ([\d.]+) after", job.stdout))
    numbers = [[float(each) for each in some[0]] for some in found]
    assert numbers[1] == pytest.approx(numbers[0], rel=2e-3)
    job = run([*ranks, *flags, "--batch_size=8"])
    assert job.returncode == 2 and "--batch_size must be a multiple of the data axis" in job.stderr


def test_a_prompt_that_cannot_be_answered_ends_before_the_training(folder, conversations):
    job = run([*command(folder, conversations), f"--prompt={'long ' * 40}"])
    assert job.returncode == 2 and "weights are trained" not in job.stdout
    assert "--prompt cannot be answered: Messages must have fewer than 64 tokens" in job.stderr


BAD = {
    "mixed": ('{"messages": [{"content": "x"}]}', "with a `role`"),
    "no answer": ('{"messages": [{"role": "user", "content": "x"}]}', "must have an answer"),
    "broken": ('{"messages": [', "must be a JSON object"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_one_line(folder, conversations, tmp_path, kind):
    line, words = BAD[kind]
    lines = conversations.read_text().splitlines()
    file = tmp_path / "bad.jsonl"
    file.write_text("\n".join([*lines[:6], line, *lines[6:]]))
    job = run(command(folder, file))
    assert job.returncode == 2
    assert job.stderr.startswith(
        f"tfdist-finetune: --dataset=chat:{file} cannot be used: {file}:7: "
    )
    assert words in job.stderr and len(job.stderr.splitlines()) == 1


REFUSED = {
    "--dataset=text:/etc/hostname --packing": "--packing requires --dataset=chat:FILE",
    "--export=hf": "--export requires --output",
    "--output=/tmp/x --export=gguf": "--export must be some of hf, peft",
    "--output=/tmp/x --export=peft": "--export=peft requires --lora_rank",
    "--sample_every=1": "--sample_every requires --prompt",
    "--preference=dpo --packing": "--packing is not supported with --preference",
    "--preference=dpo --label_smoothing=0.1": "requires --preference=conservative or robust",
    "--preference=dpo --reference=base": "--reference=base requires --lora_rank",
    "--preference=dpo --batch_shares=2,1": "--preference requires --batch_shares=equal",
    "--beta=2": "--beta requires --preference",
    "--validation=text:x": "--validation must be chat:FILE",
    "--chat_template=/nowhere": "--chat_template=/nowhere does not exist",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_flags_that_do_not_fit_are_refused(folder, conversations, flags):
    job = run([*command(folder, conversations), *flags.split()])
    assert job.returncode == 2
    assert REFUSED[flags] in job.stderr and len(job.stderr.splitlines()) == 1, job.stderr
