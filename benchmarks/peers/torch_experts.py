"""PyTorch with experts that are divided among ranks, in the manner of torchtitan's expert parallelism.

torchtitan itself wants GPUs: its grouped products and its all-to-all by token counts on the device.
This is the same plan for Gloo: a router, a sort by expert, an all-to-all there and back, and a product
for each expert. All that is no expert's is data parallel by DDP.
"""

from __future__ import annotations

import math

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from .serving import Settings, Training
from .torch_models import GPT, loss_of
from .torch_training import StepTraining, make_model, make_optimizer, meet


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks that they are for."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.splits = sent, received
        return _exchange(rows, sent, received)

    @staticmethod
    def backward(ctx, gradient):
        sent, received = ctx.splits
        return _exchange(gradient.contiguous(), received, sent), None, None


def _exchange(rows, sent: list[int], received: list[int]):
    found = rows.new_empty([sum(received), *rows.shape[1:]])
    distributed.all_to_all_single(found, rows, received, sent)
    return found


class Experts(nn.Module):
    """A router, and this rank's part of the experts.

    Args:
        width: The size of a token.
        experts: How many experts there are on all ranks.
        top_k: How many a token goes through.
        deviation: Of the kernels that add to the residual stream.
    """

    def __init__(self, width: int, experts: int, top_k: int, deviation: float):
        super().__init__()
        self.ranks = distributed.get_world_size()
        self.own, self.top_k = experts // self.ranks, top_k
        self.router = nn.Linear(width, experts, bias=False)
        nn.init.normal_(self.router.weight, std=0.02)
        self.up = nn.Parameter(0.02 * torch.randn(self.own, width, 4 * width))
        self.up_bias = nn.Parameter(torch.zeros(self.own, 4 * width))
        self.down = nn.Parameter(deviation * torch.randn(self.own, 4 * width, width))
        self.down_bias = nn.Parameter(torch.zeros(self.own, width))

    def expert_parameters(self) -> list[nn.Parameter]:
        """Those that other ranks do not have."""
        return [self.up, self.up_bias, self.down, self.down_bias]

    def forward(self, x):
        """[batch, time, width] to the same."""
        tokens = x.flatten(0, 1)
        scores = functional.softmax(self.router(tokens), dim=-1)
        gates, chosen = scores.topk(self.top_k, dim=-1)
        gates = gates / gates.sum(dim=-1, keepdim=True)
        order = torch.argsort(chosen.flatten(), stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.own * self.ranks)
        arriving = torch.empty_like(counts)
        distributed.all_to_all_single(arriving, counts)
        sent = counts.view(self.ranks, -1).sum(1).tolist()
        received = arriving.view(self.ranks, -1).sum(1).tolist()
        source = order // self.top_k
        rows = _AllToAll.apply(tokens[source], sent, received)
        # By rank and expert; wanted by expert.
        owner = torch.arange(self.own).repeat(self.ranks).repeat_interleave(arriving)
        by_expert = torch.argsort(owner, stable=True)
        per_expert = arriving.view(self.ranks, -1).sum(0).tolist()
        made = []
        for number, part in enumerate(rows[by_expert].split(per_expert)):
            hidden = torch.addmm(self.up_bias[number], part, self.up[number])
            hidden = functional.gelu(hidden, approximate="tanh")
            made.append(torch.addmm(self.down_bias[number], hidden, self.down[number]))
        results = torch.empty_like(rows).index_copy(0, by_expert, torch.cat(made))
        results = _AllToAll.apply(results, received, sent)
        results = results * gates.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, source, results).view_as(x)


def prepare(settings: Settings) -> Training:
    """Builds this rank's part of the model."""
    meet(settings)
    model, inputs, labels = make_model(settings)
    if not isinstance(model, GPT):
        raise ValueError(f"Experts require a GPT. Received: {settings.model!r}.")
    sizes, options = settings.sizes, settings.options
    deviation = 0.02 / math.sqrt(2 * sizes["layers"])
    for block in model.blocks:
        block.up = Experts(sizes["width"], options["experts"], options["top_k"], deviation)
        block.down = nn.Identity()
        block.forward = _forward.__get__(block)
    spread = {id(p) for block in model.blocks for p in block.up.expert_parameters()}
    names = [name for name, p in model.named_parameters() if id(p) in spread]
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, names)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    optimizer = make_optimizer(model.parameters())
    own = [p for p in model.parameters() if id(p) in spread]

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(replica(inputs), labels)
        loss.backward()
        # They have the sum of all ranks' losses, each of which is a mean.
        torch._foreach_div_([p.grad for p in own], settings.ranks)
        optimizer.step()
        return loss.detach()

    every = sum(p.numel() for p in model.parameters())
    return StepTraining(step, every + (settings.ranks - 1) * sum(p.numel() for p in own))


def _forward(self, x):
    """A block whose feed-forward part is a layer of experts."""
    fused = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.size))
    query, key, value = fused.permute(3, 0, 2, 1, 4)
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + self.out(attended.transpose(1, 2).flatten(2))
    return x + self.up(self.norm2(x))
