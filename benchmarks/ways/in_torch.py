"""PyTorch's DistributedDataParallel by bucket cap; ``none`` is DDP with a hook that hands every bucket back."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from benchmarks import spec
from benchmarks.ways.way import Setting, Way
from fdp.launch import available_cores


class State(NamedTuple):
    """A model in DDP and its optimizer; a step changes both in place."""

    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer


def build(asked: spec.Spec, setting: Setting) -> Way:
    """The way that ``asked`` names; what it leaves open is torch's default. A given ``cap`` is the first bucket's too.

    DDP measures in its first backward pass in which order gradients are ready and makes its buckets anew before the
    second: only from the third step on is it as fast as it will be.
    """
    pair, silent = setting.pair, asked.word == "none"

    def init(params: Any, model_state: Any) -> State:
        model = pair.torch_module()
        model.load_state_dict(pair.to_torch(params, model_state))
        wrapped = DistributedDataParallel(
            model,
            bucket_cap_mb=asked.options.get("cap"),
            gradient_as_bucket_view=asked.options.get("view", False),
            forward_sync_buffers=not silent,
            init_sync=False,  # all ranks have loaded the same values
        )
        if silent:
            wrapped.register_comm_hook(None, _hand_back)
        return State(wrapped, torch.optim.SGD(wrapped.parameters(), setting.learning_rate))

    def backward(state: State, batch: Any) -> Any:
        loss = pair.torch_loss(state.model, batch)
        loss.backward()
        return loss

    def step(state: State, batch: Any) -> tuple[State, Any]:
        loss = backward(state, batch)
        state.optimizer.step()
        state.optimizer.zero_grad()
        return state, loss

    def no_sync_step(state: State, batch: Any) -> tuple[State, Any]:
        with state.model.no_sync():
            return state, backward(state, batch)

    def params(state: State) -> dict[str, np.ndarray]:
        found = state.model.module.named_parameters()
        return {name: x.detach().numpy().copy() for name, x in found}

    return Way(
        name=asked.text,
        framework="torch",
        communicates=not silent,
        place=pair.torch_batch,
        init=init,
        step=step,
        wait=lambda state, loss: loss.item(),
        params=params,
        no_sync_step=no_sync_step,
    )


def _hand_back(_, bucket):  # torch reads annotations here, and takes them for classes only
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def connect(address: str, port: int, rank: int, size: int) -> None:
    """Joins torch's ranks over Gloo, beside JAX's own. As many threads as this rank has cores."""
    torch.set_num_threads(available_cores())
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=size
    )


def disconnect() -> None:
    """Leaves the group."""
    torch.distributed.destroy_process_group()
