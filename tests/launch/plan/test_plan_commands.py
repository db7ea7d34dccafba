"""The commands that `tfdist-plan` prints, pasted into a shell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.processes import BIN, run

CONFIGS: dict[str, dict] = {
    # As files of KerasHub and of transformers call their sizes.
    "GPT-2": {
        "class_name": "GPT2Backbone",
        "config": {
            "num_layers": 2, "hidden_dim": 32, "num_heads": 4, "vocabulary_size": 301,
            "max_sequence_length": 64,
        },
    },
    "Llama": {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 300,
        "max_position_embeddings": 64,
    },
    "Mixtral": {
        "model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 256,
        "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("text") / "text"
    file.write_text("Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. ☃\n" * 80)
    return f"--dataset=text:{file}"


def plans(*flags: str) -> list[str]:
    """The commands that are printed."""
    printed = run([sys.executable, "-m", "tfdist.launch.plan.main", *flags])
    assert printed.returncode == 0, printed.stderr
    found = re.findall(r"^\d+\. (tfdist-run .*)$", printed.stdout, re.MULTILINE)
    assert found, printed.stdout
    return found


def paste(command: str, *more: str, timeout: float = 150) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run(
        ["bash", "-c", " ".join([command, *more])],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )


def check(job: subprocess.CompletedProcess) -> None:
    assert job.returncode == 0, job.stdout[-2000:] + job.stderr[-3000:]
    assert "perplexity" in job.stdout and "on 2 rank(s)" in job.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_configurations(tmp_path, text, name):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    first, *_ = plans(f"--preset={path}", "--ranks=2", "--batch_size=8")
    assert first.startswith("tfdist-run -np 2 -- tfdist-train --model=gpt")
    assert "--batch_size=8" in first and "--dtype_policy=mixed_bfloat16" in first
    check(paste(first, text, "--epochs=1", "--threads=1"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--layers=2", "--width=32", "--heads=4", "--vocabulary=300", "--seq_length=32"],
        ["--layers=2", "--width=32", "--heads=4", "--kv_heads=2", "--hidden=48", "--seq_length=32",
         "--optimizer=momentum", "--dtype=float32", "--vocabulary=256"],
        ["--layers=2", "--width=32", "--heads=4", "--experts=4", "--top_k=1", "--seq_length=32",
         "--vocabulary=256", "--optimizer=adafactor", "--dtype=bfloat16"],
    ],
    ids=["plain", "grouped", "experts"],
)  # fmt: skip
def test_each_layout_of_a_model_by_hand(text, flags):
    for command in plans(*flags, "--ranks=2", "--batch_size=8", "--best=4"):
        check(paste(command, text, "--epochs=1", "--threads=1"))


def make_preset(folder: Path, family: str) -> None:
    """A preset with its tokenizer, without training."""
    import keras_hub
    from tokenizers import ByteLevelBPETokenizer

    trainer = ByteLevelBPETokenizer()
    names = (
        "endoftext",
        "begin_of_text",
        "end_of_text",
        "start_header_id",
        "end_header_id",
        "eot_id",
    )
    special = [f"<|{name}|>" for name in names]
    trainer.train_from_iterator(
        ["a few words of a text"] * 9, vocab_size=300, special_tokens=special
    )
    vocabulary, merges = trainer.save_model(str(folder.parent))
    if family == "GPT2":
        tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary, merges)
        backbone = keras_hub.models.GPT2Backbone(
            tokenizer.vocabulary_size(), 2, 4, 32, 64, dropout=0.0, max_sequence_length=64
        )
    else:
        tokenizer = keras_hub.models.Llama3Tokenizer(vocabulary, merges)
        backbone = keras_hub.models.Llama3Backbone(tokenizer.vocabulary_size(), 2, 4, 32, 48, 2)
    kind = getattr(keras_hub.models, f"{family}CausalLM")
    preprocessor = getattr(keras_hub.models, f"{family}CausalLMPreprocessor")(
        tokenizer, sequence_length=32
    )
    kind(backbone, preprocessor, compile=False).save_to_preset(str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["GPT2", "Llama3"])
def test_presets(tmp_path, text, family):
    pytest.importorskip("keras_hub")
    folder = tmp_path / "preset"
    make_preset(folder, family)
    flags = [f"--preset={folder}", "--ranks=2", "--batch_size=8", "--seq_length=32", "--best=2"]
    for command in plans(*flags):
        assert command.startswith(f"tfdist-run -np 2 -- tfdist-finetune --preset={folder}")
        check(paste(command, text, "--threads=1"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_as_it_is_printed(tmp_path):
    """Nothing added: on the text that comes with Python, for as many epochs as by default."""
    sizes = ["--layers=1", "--width=16", "--heads=2", "--vocabulary=256", "--seq_length=64"]
    command, *_ = plans(*sizes, "--ranks=2", "--batch_size=64", "--dtype=float32")
    check(paste(command, timeout=800))


def test_the_mixed_precision_of_others_has_no_program():
    for dtype, name in (("deepspeed", "DeepSpeed"), ("megatron", "Megatron-LM")):
        printed = run(
            [sys.executable, "-m", "tfdist.launch.plan.main", "--ranks=2", f"--dtype={dtype}"]
        )
        assert printed.returncode == 0, printed.stderr
        assert f"--dtype={dtype} is not supported for training" in printed.stdout
        assert f"mixed precision of {name}" in printed.stdout
        assert "tfdist-train" not in printed.stdout and "import tfdist" not in printed.stdout
