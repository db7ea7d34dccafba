"""Writes golden.json and tokenizer.json: `python make_golden.py`, with transformers installed.

What transformers renders and encodes, for `test_templates.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tokenizers
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from templates import CONVERSATIONS, SPECIAL, TEMPLATES  # noqa: E402

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def make_tokenizer() -> None:
    """Bytes and some merges, with special tokens."""
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = " ".join(
        str(message["content"]) for each in CONVERSATIONS.values() for message in each["messages"]
    )
    found.train_from_iterator([text] * 4, trainer)
    found.save(str(HERE / "tokenizer.json"), pretty=False)


def main() -> None:
    make_tokenizer()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(HERE / "tokenizer.json"), **NAMES
    )
    golden = []
    for name, source in TEMPLATES.items():
        for kind, given in CONVERSATIONS.items():
            for prompt in (False, True):
                options = {
                    "chat_template": source,
                    "add_generation_prompt": prompt,
                    "tools": given.get("tools"),
                }
                case = {"template": name, "conversation": kind, "prompt": prompt}
                try:
                    case["text"] = tokenizer.apply_chat_template(
                        given["messages"], tokenize=False, **options
                    )
                    encoded = tokenizer.apply_chat_template(
                        given["messages"],
                        tokenize=True,
                        return_dict=True,
                        return_assistant_tokens_mask="endgeneration" in source,
                        **options,
                    )
                    case["ids"] = encoded["input_ids"]
                    case["mask"] = encoded.get("assistant_masks")
                except Exception as error:
                    case["error"] = type(error).__name__
                golden.append(case)
    lines = ",\n".join(json.dumps(case) for case in golden)
    head = json.dumps({"transformers": transformers.__version__})
    (HERE / "golden.json").write_text(f'{{"made with": {head}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
