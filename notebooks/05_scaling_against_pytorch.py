# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---
# %% [markdown]
# # Scaling, beside PyTorch
#
# What fdp and PyTorch DDP take for a step, on the same wires, from the same weights, in turns. The pictures are drawn
# from the committed results in `benchmarks/results`; how they were measured, and what limits them, stands in
# [docs/benchmarks.md](../docs/benchmarks.md). Beside them stand the figures of the paper: Li et al., "PyTorch
# Distributed: Experiences on Accelerating Data Parallel Training", PVLDB 13(12), 2020, read off its plots, to one to
# three percent.
#
# Two ranks of one core each, with Gloo, are no cluster of 32 GPUs: shapes and ratios can be compared, seconds cannot.

# %%
# %matplotlib inline
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
from IPython.display import display
from matplotlib.figure import Figure

jax.config.update("jax_num_cpu_devices", 8)
ROOT = Path.cwd().resolve()
while not (ROOT / "benchmarks").is_dir():
    ROOT = ROOT.parent
sys.path.insert(0, str(ROOT))
results = {
    path.stem: json.loads(path.read_text("utf-8"))
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))
}


def figures(name):
    """The complete results of one figure, by file."""
    return {
        key: found
        for key, found in results.items()
        if key.startswith(name) and found.get("complete") and not found.get("quick")
    }


def pictures(name):
    """Draws them; says so where there is none."""
    drawn = importlib.import_module(f"benchmarks.figures.{name}")
    found = figures(name)
    if not found:
        print(f"no result of {name} is committed: python -m benchmarks.figures.{name} makes one")
    for result in found.values():
        picture = drawn.draw(result)
        picture.set_dpi(64)  # the files in benchmarks/results are sharper
        display(picture)


# %% [markdown]
# ## A step
#
# Ways to train one model, the fastest of each framework first. The lines are the best that any schedule could do which
# ends a step before the next one begins, and the longer of computing and sending.

# %%
pictures("t1_step_time")

# %% [markdown]
# ## Bucket caps (figures 7 and 8 of the paper)
#
# The paper's figures, with Gloo on 32 GPUs: seconds an iteration by `bucket_cap_mb`, 0 for a bucket a gradient. Both
# ends are worse than the middle.

# %%
PAPER_CAPS = {
    "ResNet-50": {0: 0.345, 5: 0.159, 10: 0.163, 25: 0.188, 50: 0.217},
    "BERT": {0: 1.007, 5: 0.774, 10: 0.794, 25: 0.831, 50: 0.894, 100: 0.909, 200: 0.879},
}
figure = Figure(figsize=(5.5, 2.6), layout="constrained")
axes = figure.subplots()
for (name, steps), style in zip(PAPER_CAPS.items(), ("o-k", "s--C7"), strict=True):
    best = min(steps.values())
    axes.plot(range(len(steps)), [s / best for s in steps.values()], style, label=name)
axes.set_xticks(range(7), [str(cap) for cap in PAPER_CAPS["BERT"]])
axes.set_xlabel("bucket cap, MB")
axes.set_ylabel("step / best step")
axes.set_title("The paper: 32 GPUs, Gloo", fontsize=10)
axes.legend()
display(figure)

# %%
pictures("fig07_bucket_cap")

# %% [markdown]
# ## More ranks (figure 9)
#
# The paper's, as multiples of one GPU's iteration: near the abstract's "near-linear" only for ResNet-50 with NCCL, half
# of it at 256.

# %%
PAPER_RANKS = {
    "ResNet-50, NCCL": [0.151, 0.174, 0.178, 0.196, 0.220, 0.256, 0.253, 0.263, 0.305],
    "ResNet-50, Gloo": [0.162, 0.214, 0.257, 0.276, 0.291, 0.373, 0.395, 0.443, 0.498],
    "BERT, NCCL": [0.335, 0.466, 0.532, 0.574, 0.729, 0.574, 0.610, 0.633, 0.801],
    "BERT, Gloo": [0.335, 0.861, 1.16, 1.29, 1.41, 1.72, 1.80, 2.08, 2.33],
}
figure = Figure(figsize=(5.5, 2.8), layout="constrained")
axes = figure.subplots()
for (name, steps), style in zip(PAPER_RANKS.items(), ("o-k", "o--k", "s-C7", "s--C7"), strict=True):
    axes.plot([2**i for i in range(9)], [s / steps[0] for s in steps], style, label=name)
axes.set_xscale("log", base=2)
axes.set_xlabel("GPUs")
axes.set_ylabel("iteration / one GPU's")
axes.set_title("The paper: weak scaling", fontsize=10)
axes.legend()
display(figure)

# %%
pictures("fig09_scaling")

# %% [markdown]
# ## Fewer reductions (figure 10), and what that does to the loss (figure 11)

# %%
pictures("fig10_no_sync")

# %%
pictures("fig11_convergence")

# %% [markdown]
# ## Where the time goes (figure 6), and several buckets in flight (figure 12)

# %%
pictures("fig06_breakdown")

# %%
pictures("fig12_windows")

# %% [markdown]
# ## Live, small
#
# Two processes on this machine, over the loopback interface, a small network, a few steps. The run checks that all ways
# compute the same before it times them; times of so small a run say little. PyTorch takes part if it is installed
# (`pip install 'fdp[bench]'`).

# %%
ways = ["jax:pmean", "fdp:ordered,cap=1", "fdp:serialized,cap=1"]
if importlib.util.find_spec("torch"):
    ways += ["torch:cap=1,view=on", "torch:cap=25,view=on"]
with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "live.json"
    command = [
        sys.executable,
        "-m",
        "fdp.launch",
        "-n",
        "2",
        "-m",
        "benchmarks.rank",
        "--ways",
        *ways,
    ]
    command += "--model mlp:widths=256x7 --batch 256 --rounds 2 --steps 2".split()
    ended = subprocess.run(
        [*command, "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    live = json.loads(out.read_text())
for name, way in sorted(live["ways"].items(), key=lambda item: item[1]["median_s"]):
    print(f"{name:24} {1e3 * way['median_s']:8.1f} ms a step")

# %% [markdown]
# In the committed results, losses of fdp and PyTorch from the same weights and data agree over 200 iterations, and in
# the live run every way took the same first step:

# %%
for result in figures("fig11_convergence").values():
    print(f"largest difference between the losses: {result['largest_difference']:.1e}")
    assert result["agree"]
assert live["complete"]
assert all(way["median_s"] > 0 for way in live["ways"].values())
