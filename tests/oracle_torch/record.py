"""Records what torch's DistributedDataParallel does, so that tests can hold fdp against it where torch is not.

    python -m venv .venv-torch && .venv-torch/bin/pip install torch==2.13.0 numpy
    .venv-torch/bin/python tests/oracle_torch/record.py        # writes recorded.json beside this file

Processes on this machine, CPU tensors, Gloo. Inputs are small whole numbers, so that every value recorded is exact
and does not depend on the machine, or nearly so.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import scenarios
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank: int, world: int, folder: str) -> None:
    """One process: runs every scenario that is meant for ``world`` processes."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    results = {}
    for name, (worlds, run) in scenarios.ALL.items():
        if world in worlds:
            torch.manual_seed(0)
            results[name] = run(rank, world)
            dist.barrier()
    Path(folder, f"{world}-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main() -> None:
    """Runs the scenarios in 2 and in 4 processes and writes ``recorded.json``."""
    recorded: dict[str, object] = {"torch": torch.__version__.partition("+")[0], "backend": "gloo"}
    with tempfile.TemporaryDirectory() as folder:
        for world in (2, 4):
            mp.spawn(worker, args=(world, folder), nprocs=world)
            ranks = [
                json.loads(Path(folder, f"{world}-{r}.json").read_text()) for r in range(world)
            ]
            for name in ranks[0]:
                entry = recorded.setdefault(name, {})
                assert isinstance(entry, dict)
                entry[str(world)] = [rank[name] for rank in ranks]
    recorded["models"] = scenarios.MODELS
    target = Path(__file__).with_name("recorded.json")
    lines = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in recorded.items())
    target.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
