"""A program for a Python with transformers: writes the logits of a model of a folder, or of an adapter of PEFT.

    python transformers_logits.py FOLDER IDS.npy LOGITS.npy

It imports nothing of tfdist, which that Python may lack.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers


def main(folder: str, given: str, written: str) -> None:
    """Writes float32 [rows, time, vocabulary]."""
    if (Path(folder) / "adapter_config.json").is_file():
        import peft

        kind = peft.AutoPeftModelForCausalLM
    else:
        kind = transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(np.load(given), dtype=torch.long)
    with torch.no_grad():
        np.save(written, model(input_ids=ids).logits.numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
