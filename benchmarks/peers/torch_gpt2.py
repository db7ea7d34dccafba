"""A GPT-2 of transformers with adapters of peft on the matrices that KerasHub's `enable_lora` takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


class Projections(nn.Module):
    """Queries, keys and values, each with a matrix of its own: transformers has one for all three.

    KerasHub's adapters are on the first and the last, and a matrix of all three cannot be split by
    heads.
    """

    def __init__(self, width: int):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        """[batch, time, width] to the three beside each other."""
        return torch.cat([self.query(x), self.key(x), self.value(x)], -1)


def make_gpt2(sizes: Mapping[str, int]):
    """The model with adapters, without values: they are given to what a rank keeps."""
    width = sizes["width"]
    config = GPT2Config(
        vocab_size=sizes["vocabulary"],
        n_positions=sizes["positions"],
        n_embd=width,
        n_layer=sizes["layers"],
        n_head=sizes["heads"],
        # The same function as its own one, in one kernel.
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
        for block in model.transformer.h:
            block.attn.c_attn = Projections(width)
            # Products of transformers' own kind cannot be split by a plan.
            block.attn.c_proj = nn.Linear(width, width)
            block.mlp.c_fc = nn.Linear(width, 4 * width)
            block.mlp.c_proj = nn.Linear(4 * width, width)
        adapters = LoraConfig(
            r=sizes["rank"],
            lora_alpha=sizes["rank"],
            target_modules=["query", "value"],
            # `enable_lora` leaves the biases of these two to be trained.
            bias="lora_only",
        )
        return get_peft_model(model, adapters)


def give_values(model) -> None:
    """Takes memory for what this rank keeps, and draws it."""
    model.to_empty(device="cpu")
    tie(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or ".lora_B." in name:
                nn.init.zeros_(parameter)
            elif ".ln_" in name:
                nn.init.ones_(parameter)
            elif ".lora_A." in name:
                # As peft itself does: Kaiming's with a slope of sqrt(5).
                bound = 1 / math.sqrt(parameter.shape[1])
                nn.init.uniform_(parameter, -bound, bound)
            else:
                nn.init.normal_(parameter, std=0.02)


def tie(model) -> None:
    """Makes the head's matrix the embedding's again."""
    inner = model.base_model.model
    inner.lm_head.weight = inner.transformer.wte.weight


def logits_of(model) -> Callable:
    """The model as a function from tokens to logits."""
    return lambda inputs: model(input_ids=inputs).logits


def counts(model) -> tuple[int, int]:
    """How many parameters the model has without adapters, and how many are trained."""
    named = list(model.named_parameters())
    base = sum(parameter.numel() for name, parameter in named if ".lora_" not in name)
    return base, sum(parameter.numel() for _, parameter in named if parameter.requires_grad)
