"""TRL on pairs of answers: makes what the tests of preferences compare with.

    .peers/torch/bin/python benchmarks/peers/trl_preferences.py tests/addons/hub/preferences/golden.npz

A tiny Llama with random weights and four pairs as token ids; for each loss, three steps of plain SGD: constant rate, no
clipping, no dropout, float32, all pairs in each batch. The file has the configuration and the weights, the ids, and by loss
the losses and the log-probabilities of answers of each step.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

WORDS, STEPS, RATE, BETA = 32, 3, 0.05, 0.1
#: The ids of the prompt, of the chosen and of the rejected answer; each answer ends in `END`.
PAD, END = 0, 1
SIZES = [(3, 4, 2), (2, 5, 8), (4, 1, 3), (1, 9, 6)]
CONFIG = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": PAD,
}
LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {"loss_type": "sigmoid"},
    "ipo": {"loss_type": "ipo"},
    "robust": {"loss_type": "robust", "label_smoothing": 0.1},
    "orpo": {},
}


def words(ids) -> str:
    """A text whose tokens are some ids."""
    return " ".join(f"[{number}]" for number in ids)


def tokenizer() -> PreTrainedTokenizerFast:
    """One that splits at spaces."""
    vocabulary = {f"[{number}]": number for number in range(WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=f"[{WORDS - 1}]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=f"[{PAD}]",
        eos_token=f"[{END}]",
        unk_token=f"[{WORDS - 1}]",
    )


def pairs() -> list[dict[str, list[int]]]:
    """The ids of each pair."""
    random = np.random.default_rng(3)
    return [
        {
            name: random.integers(2, WORDS - 1, size).tolist() + [END] * (name != "prompt")
            for name, size in zip(("prompt", "chosen", "rejected"), sizes, strict=True)
        }
        for sizes in SIZES
    ]


def trained(kind: str, weights: dict[str, np.ndarray]) -> tuple[list[float], list]:
    """Losses and log-probabilities of three steps."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIG))
    model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    model.float()
    config, trainer = (ORPOConfig, ORPOTrainer) if kind == "orpo" else (DPOConfig, DPOTrainer)
    losses: list[float] = []
    found: list = []

    class Recording(trainer):  # type: ignore[misc, valid-type]
        """Keeps the losses, which the trainer rounds in its logs."""

        def compute_loss(self, *args, **kwargs):
            """The loss of a batch."""
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float((loss[0] if isinstance(loss, tuple) else loss).detach()))
            metrics = getattr(self, "_metrics", None) or self._stored_metrics
            found.append({name: float(values[-1]) for name, values in metrics["train"].items()})
            return loss

    with tempfile.TemporaryDirectory() as folder:
        options = config(
            folder,
            beta=BETA,
            max_length=64,
            per_device_train_batch_size=len(SIZES),
            max_steps=STEPS,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            weight_decay=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **LOSSES[kind],
        )
        data = Dataset.from_list(
            [
                # The trainers add the end of each answer.
                {name: words(ids[:-1] if name != "prompt" else ids) for name, ids in pair.items()}
                for pair in pairs()
            ]
        )
        data = data.map(lambda pair: {name: f" {pair[name]}" for name in ("chosen", "rejected")})
        # Without a path that it could be read from again.
        reference = {} if kind == "orpo" else {"ref_model": copy.deepcopy(model)}
        Recording(
            model=model,
            args=options,
            train_dataset=data,
            processing_class=tokenizer(),
            **reference,
        ).train()
    return losses, found


def main() -> None:
    """Writes the file."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIG))
    random = np.random.default_rng(7)
    weights = {
        name: (random.normal(0, 0.4, tuple(value.shape)) + ("norm" in name)).astype("float32")
        for name, value in model.state_dict().items()
    }
    described = json.loads(model.config.to_json_string())
    arrays: dict[str, Any] = {
        "config": json.dumps(described | {"architectures": [type(model).__name__]}),
        "pairs": json.dumps(pairs()),
        **{f"weights/{name}": value for name, value in weights.items()},
    }
    for kind in LOSSES:
        losses, found = trained(kind, weights)
        arrays[f"{kind}/losses"] = np.array(losses)
        for name in ("logps/chosen", "logps/rejected"):
            arrays[f"{kind}/{name}"] = np.array([step[name] for step in found])
        print(kind, losses, found[0])
    path = Path(sys.argv[1])
    np.savez_compressed(path, **arrays)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
