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
# # Seeing the overlap
#
# Whether gradients cross while the backward pass still runs is decided by the compiler, and can be seen in its
# program: as a plan, as a string, as an estimated timeline of hardware that is not here, and as a measured one of
# the devices that are.
#
# The steps are in [programs.py](programs.py): eight layers of 2048 x 2048, with 4096 examples on each of eight
# devices, written one after the other (*unrolled*) or as a `lax.scan` over the layers (*scanned*); the gradients
# are reduced by plain `jax.lax.pmean` or by fdp. The programs for eight H100 and for eight TPU v5e chips were
# made by their compilers and are stored in `recorded/` (jax 0.10.2), so that this notebook needs neither.
# `fdp.aot` compiles anew.

# %%
# %matplotlib inline
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
from jax.sharding import Mesh

import fdp

jax.config.update("jax_num_cpu_devices", 8)
cpus = Mesh(np.array(jax.devices()), ("data",))

# %% [markdown]
# ## The plan
#
# What fdp intends, from shapes alone. The cap is one layer's gradient, 16 MiB, and the last layer goes first.

# %%
trainer = programs.trainer_for("unrolled", cpus)
params, batch = programs.shapes("unrolled", cpus.size)
fdp.inspect.plot_plan(trainer.plan(trainer.init(params), batch))

# %% [markdown]
# ## The schedule, as a string
#
# `G` is a matmul, `f` other compute, `W` a loop. An all-reduce is `[` where it starts and `]` where its result is
# waited for: what stands between runs beside it. On H100, layers unrolled and then scanned (the loop's body
# stands on a line of its own):

# %%
texts = {
    (target, model, way): programs.recorded(model, way, target)
    for target in programs.TARGETS
    for model in programs.MODELS
    for way in programs.WAYS
}


def show(target):
    for model in programs.MODELS:
        for way in programs.WAYS:
            schedules = fdp.inspect.interleavings(texts[target, model, way]).values()
            print(f"{model:9} {way:6}", "\n                 ".join(schedules))


show("h100")

# %% [markdown]
# Unrolled, XLA does well by itself: each of these gradients is more than half of the size up to which it merges
# all-reduces on GPU (30 MiB), so they stay apart, and each has matmuls beside it. fdp gains nothing here.
# Scanned, `pmean` waits for the loop to end (`W[]`), and nothing is beside it. fdp reduces inside the loop, one
# iteration late: `[fGfG]`.
#
# On TPU, `pmean` overlaps nothing in either form: all-reduces are merged, and synchronous unless options say
# otherwise, which `data_parallel` gives.

# %%
show("v5e")

# %% [markdown]
# ## Estimated timelines
#
# The schedule, played through with the makers' peak figures: a kernel takes its roofline time, a collective
# latency plus bytes over bandwidth. It is good for comparing two schedules of one model, not for predicting a
# step.


# %%
def timelines(target):
    return {
        f"{model}, {way}": fdp.inspect.timeline(texts[target, model, way], target)
        for model in programs.MODELS
        for way in programs.WAYS
    }


on_h100 = timelines("h100")
fdp.inspect.plot(on_h100)

# %%
on_v5e = timelines("v5e")
fdp.inspect.plot(on_v5e)

# %%
print(f"{'':18}{'us a step':>10}{'us on links':>13}{'hidden':>8}")
for target, found in {"h100": on_h100, "v5e": on_v5e}.items():
    for name, one in found.items():
        micro, link = one.seconds * 1e6, one.link_seconds * 1e6
        print(f"{target:5} {name:16}{micro:6,.0f}{link:13,.0f}{one.hidden:8.0%}")

# %% [markdown]
# Compare the two ways of one model. The scanned steps are longer whatever the reduction: their loops slice and
# write stacked arrays, and the estimate counts that traffic. And hiding is not free: on H100 fdp's unrolled step
# is estimated to be *slower* than `pmean`'s, since its reductions wait for each other. Which way is fastest for
# your model is a question to ask, not a slogan.
#
# The program for CPU is no stand-in for those of other compilers. Its text is one order out of many, and here it has
# every matmul before the first gradient's reduction; so played through with the figures of an H100 it hides next to
# nothing, with fdp too. What it does tell is what *may* run beside each reduction: the matmuls that neither need it
# nor are needed by it.

# %%
compiled = programs.lower("unrolled", "fdp", cpus).compile()
stand_in = fdp.inspect.timeline(compiled, "h100")
print(f"fdp, hidden: {stand_in.hidden:.0%} as compiled for CPU, ", end="")
print(f"{on_h100['unrolled, fdp'].hidden:.0%} as compiled for H100")
flops = [f"{one.flops / 1e9:.0f}" for one in fdp.inspect.overlap(compiled)]
print("GFLOP that may run beside each reduction, the loss's first:", ", ".join(flops))

# %% [markdown]
# ## Measured, on CPU devices
#
# `jax.profiler` records when each operation of a program ran, and `read_trace` picks them out of a trace by the
# program's own names. Two fake devices, since this is meant for two cores; they share memory and a machine, so
# the picture shows *what ran beside what*, not how fast a network is. A collective's time includes waiting for
# the other device.


# %%
def loss_fn(params, batch):
    x = batch["x"]
    for kernel in params:
        x = jnp.tanh(x @ kernel)
    return jnp.mean((x - batch["y"]) ** 2)


rng = np.random.default_rng(0)
kernels = [rng.normal(size=(512, 512)).astype(np.float32) / 23 for _ in range(6)]
data = {name: rng.normal(size=(1024, 512)).astype(np.float32) for name in "xy"}
two = Mesh(np.array(jax.devices()[:2]), ("data",))
small = fdp.data_parallel(
    loss_fn, optax.sgd(0.1), mesh=two, bucket_bytes=2**20, first_bucket_bytes=2**20
)
state = small.init(kernels)
for _ in range(3):  # the first one compiles
    state, info = small.train_step(state, data)
jax.block_until_ready(state)

with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
        for _ in range(3):
            state, info = small.train_step(state, data)
            jax.block_until_ready(state)
    compiled = small.lower(state, data).compile()
    trace = fdp.inspect.read_trace(folder, compiled)
fdp.inspect.plot_trace(trace)

# %% [markdown]
# Each bucket of the plan is a bar in the lower lane of each device. The loss crosses too, and the last bucket comes
# when little is left to compute.

# %%
collectives = [c.name for c in fdp.inspect.collectives(compiled)]
for device in trace.devices:
    ran = [s.name for s in trace.spans if s.device == device and s.kind == "collective"]
    assert sorted(ran) == sorted(collectives), "the trace is not of this program"

print("every reduction of the program was measured on each device:", len(collectives))

for found in (on_h100, on_v5e):
    assert found["scanned, pmean"].hidden == 0.0
    assert found["scanned, fdp"].hidden > 0.8
    assert found["scanned, fdp"].seconds < found["scanned, pmean"].seconds
assert on_v5e["unrolled, fdp"].seconds < on_v5e["unrolled, pmean"].seconds
assert on_h100["unrolled, fdp"].seconds > on_h100["unrolled, pmean"].seconds  # as said above
