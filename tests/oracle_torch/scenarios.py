"""What ``record.py`` runs: each scenario is a function of (rank, world size) that returns plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

# Shapes in the order of definition, and one dtype for all or one each.
MODELS: dict[str, tuple[list[list[int]], list[str]]] = {
    "six layers": ([[256, 256], [256]] * 6, ["float32"] * 12),
    "equal leaves": ([[64, 64]] * 8, ["float32"] * 8),
    "one large": ([[16], [512, 512], [16], [16]], ["float32"] * 4),
    "mixed": (
        [[8], [8], [8], [8], [8], [8]],
        ["float32", "bfloat16", "float32", "complex64", "bfloat16", "complex64"],
    ),
}
# Name -> arguments of DDP.
CAPS: dict[str, dict[str, Any]] = {
    "default": {},
    "half": {"bucket_cap_mb": 0.5},
    "two leaves": {"bucket_cap_mb": 32768 / 2**20},
    "zero": {"bucket_cap_mb": 0},
    "find_unused": {"find_unused_parameters": True},
}


def plain(x: Any) -> Any:
    """Tensors as nested lists; complex numbers as [real, imaginary]."""
    if x is None:
        return None
    x = x.detach()
    return (torch.view_as_real(x) if x.is_complex() else x.to(torch.float64)).tolist()


class Leaves(nn.Module):
    """Parameters by shape and dtype; the loss is their sum times a coefficient, so every gradient is known."""

    def __init__(self, shapes: list[list[int]], dtypes: list[str], value: float = 1.0):
        super().__init__()
        self.leaves = nn.ParameterList(
            nn.Parameter(torch.full(shape, value, dtype=getattr(torch, dtype)))
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )

    def forward(self, coefficient: complex, use: list[bool] | None = None) -> torch.Tensor:
        total = torch.zeros(())
        for i, leaf in enumerate(self.leaves):
            if use is None or use[i]:
                scaled = leaf * (coefficient if leaf.is_complex() else float(coefficient.real))
                term = scaled.real.sum() if leaf.is_complex() else scaled.float().sum()
                total = total + term
        return total


class Plane(nn.Module):
    """x @ w + b, relu, @ v: small whole numbers in, small whole numbers out."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter((torch.arange(12.0).reshape(3, 4) % 5) - 2)
        self.b = nn.Parameter(torch.tensor([1.0, -1.0, 2.0, 0.0]))
        self.v = nn.Parameter((torch.arange(8.0).reshape(4, 2) % 3) - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.w + self.b) @ self.v


def examples(rank: int, step: int = 0, count: int = 2) -> torch.Tensor:
    """``[count, 3]``: whole numbers between -3 and 3."""
    start = 6 * (rank + 10 * step)
    return ((torch.arange(3.0 * count).reshape(count, 3) + start) * 5 % 7) - 3


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).sum(1).mean()


def grads_of(model: nn.Module) -> dict[str, Any]:
    return {name.removeprefix("module."): plain(p.grad) for name, p in model.named_parameters()}


def values_of(model: nn.Module) -> dict[str, Any]:
    return {name.removeprefix("module."): plain(p) for name, p in model.named_parameters()}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


def buckets(rank: int, world: int) -> Any:
    found = {}
    for model_name, (shapes, dtypes) in MODELS.items():
        for cap_name, options in CAPS.items():
            ddp = DDP(Leaves(shapes, dtypes), **options)
            for _ in range(3):
                ddp(1.0 + 0j).backward()
            data = ddp._get_ddp_logging_data()
            groups = data.get("rebuilt_per_bucket_param_indices", "")
            found[f"{model_name}/{cap_name}"] = {
                "bucket_cap_bytes": data["bucket_cap_bytes"],
                "initial": numbers(data["bucket_sizes"]),
                "rebuilt": numbers(data.get("rebuilt_bucket_sizes", "")),
                "rebuilt_indices": [[int(i) for i in group.split()] for group in groups.split(",")]
                if groups
                else [],
            }
    return found


def average(rank: int, world: int) -> Any:
    ddp = DDP(Plane())
    loss_of(ddp, examples(rank)).backward()
    return grads_of(ddp)


def training(rank: int, world: int) -> Any:
    """Three steps of SGD with momentum and weight decay. Rank 0's initial values are everybody's."""
    model = Plane()
    with torch.no_grad():
        model.w += rank
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=2**-7, momentum=0.5, weight_decay=0.25)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(ddp, examples(rank, step)).backward()
        optimizer.step()
    return values_of(ddp)


def no_sync(rank: int, world: int) -> Any:
    """Two backward passes without communication, then one with."""
    ddp = DDP(Plane())
    with ddp.no_sync():
        for step in range(2):
            loss_of(ddp, examples(rank, step)).backward()
    local = grads_of(ddp)
    loss_of(ddp, examples(rank, 2)).backward()
    return {"local": local, "reduced": grads_of(ddp)}


def unused(rank: int, world: int) -> Any:
    """Leaf 1 is used in step 0 by all, in step 1 by none, in step 2 by rank 0 alone."""
    found = {}
    for to_none in (True, False):
        ddp = DDP(Leaves([[2]] * 3, ["float32"] * 3), find_unused_parameters=True)
        leaves = ddp.module.leaves
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.5, weight_decay=0.25)
        steps = []
        for used in (True, False, rank == 0):
            optimizer.zero_grad(set_to_none=to_none)
            ddp(4.0 * (rank + 1) + 0j, [True, used, True]).backward()
            grads = [plain(leaf.grad) for leaf in leaves]
            optimizer.step()
            momentum = [plain(optimizer.state[leaf]["momentum_buffer"]) for leaf in leaves]
            values = [plain(leaf) for leaf in leaves]
            steps.append({"grads": grads, "momentum": momentum, "values": values})
        found["set_to_none" if to_none else "zeroed"] = steps
    return found


def join(rank: int, world: int) -> Any:
    """Rank 0 has two batches, rank 1 three; the gradients of every step and the values at the end."""
    found = {}
    for initial in (True, False):
        ddp = DDP(Plane())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=2**-7)
        grads = []
        with ddp.join(divide_by_initial_world_size=initial):
            for step in range(2 + rank):
                optimizer.zero_grad()
                loss_of(ddp, examples(rank, step)).backward()
                grads.append(grads_of(ddp))
                optimizer.step()
        found["initial" if initial else "live"] = {"grads": grads, "values": values_of(ddp)}
    return found


class Counting(nn.Module):
    """A parameter and two buffers that every forward moves, by an amount of the rank's own."""

    def __init__(self, rank: int):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.rank = rank
        self.register_buffer("average", torch.tensor([10.0 + 9 * rank]))
        self.register_buffer("count", torch.tensor(100 + rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average += 1 + self.rank
        self.count += 1 + self.rank
        return self.w * x


def buffers(rank: int, world: int) -> Any:
    found = {}
    for sync in (True, False):
        ddp = DDP(Counting(rank), broadcast_buffers=sync)
        steps = [[plain(ddp.module.average), plain(ddp.module.count)]]
        for _ in range(2):
            ddp(torch.ones(1)).sum().backward()
            steps.append([plain(ddp.module.average), plain(ddp.module.count)])
        found["from rank 0" if sync else "local"] = steps
    return found


def dtypes(rank: int, world: int) -> Any:
    """Gradients (rank + 1) times the conjugate of 1 + 2j, in four types."""
    names = ["float32", "float16", "bfloat16", "complex64", "float64"]
    ddp = DDP(Leaves([[2]] * len(names), names))
    ddp((rank + 1) * (1 + 2j)).backward()
    return {name: plain(leaf.grad) for name, leaf in zip(names, ddp.module.leaves, strict=True)}


# No annotations: torch compares those of a hook with its own types.
def sum_first(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda done: done.value()[0] / dist.get_world_size())


def untouched(state, bucket):
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def bf16(state, bucket):
    """What ``bf16_compress_hook`` runs, which DDP refuses with Gloo."""
    return default_hooks._compress_hook(torch.bfloat16, dist.group.WORLD, bucket)


HOOKS: dict[str, tuple[Any, str, list[float]]] = {
    # hook, dtype of the gradients, gradient on each rank (the last for all the others)
    "none, large": (None, "float16", [3e4]),
    "sum first, large": (sum_first, "float16", [3e4]),
    "none, one large": (None, "float32", [1e5, 0.0]),
    "fp16, one large": (default_hooks.fp16_compress_hook, "float32", [1e5, 0.0]),
    "bf16, one large": (bf16, "float32", [1e5, 0.0]),
    "fp16, digits": (default_hooks.fp16_compress_hook, "float32", [1 + 2.0**-12]),
    "bf16, digits": (bf16, "float32", [1 + 2.0**-9]),
    "none, huge": (None, "float32", [3e38]),
    "none, undivided": (untouched, "float32", [3.0, 5.0]),
}


def hooks(rank: int, world: int) -> Any:
    found = {}
    for name, (hook, dtype, coefficients) in HOOKS.items():
        ddp = DDP(Leaves([[2]], [dtype]))
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        ddp(coefficients[min(rank, len(coefficients) - 1)] + 0j).backward()
        found[name] = plain(ddp.module.leaves[0].grad)
    return found


def shared(rank: int, world: int) -> Any:
    """One parameter used twice, one frozen: what is reduced, and in how many bytes."""
    model = Leaves([[4], [3]], ["float32", "float32"])
    model.leaves[1].requires_grad_(False)
    ddp = DDP(model)
    (ddp(rank + 1.0 + 0j) * model.leaves[0].sum()).backward()
    data = ddp._get_ddp_logging_data()
    return {"bytes": numbers(data["bucket_sizes"]), "grads": [plain(p.grad) for p in model.leaves]}


BOTH, TWO = (2, 4), (2,)
ALL: dict[str, tuple[tuple[int, ...], Callable[[int, int], Any]]] = {
    "buckets": (TWO, buckets),
    "average": (BOTH, average),
    "training": (BOTH, training),
    "no_sync": (BOTH, no_sync),
    "unused": (TWO, unused),
    "join": (TWO, join),
    "buffers": (TWO, buffers),
    "dtypes": (BOTH, dtypes),
    "hooks": (BOTH, hooks),
    "shared": (TWO, shared),
}
