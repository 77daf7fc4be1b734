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
# # Quickstart
#
# Train a small network on handwritten digits, on eight devices at once, and look at what crosses between them.
# The eight devices are fake ones that share this machine's CPU: good for seeing what happens, not for speed. On a
# machine with accelerators, leave out the line that asks for them.
#
# Needed: `pip install 'fdp[notebooks]'` in a clone of the repository.

# %%
# %matplotlib inline
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import fdp

jax.config.update("jax_num_cpu_devices", 8)  # before the first use of a device
print(jax.device_count(), "devices")

# %% [markdown]
# ## A model and a loss
#
# Parameters are a pytree of arrays, and the loss is a function of parameters and a batch: a mean over the
# examples it is given. fdp asks for nothing else, so a flax, equinox or haiku model does as well.

# %%
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = (digits.data[order] / 16).astype(np.float32)
labels = digits.target[order].astype(np.int32)
train, held_out = slice(0, 1536), slice(1536, None)


def init_params(seed):
    rng = np.random.default_rng(seed)
    sizes = [64, 128, 128, 128, 10]
    return [
        {
            "kernel": (rng.normal(size=pair) / np.sqrt(pair[0])).astype(np.float32),
            "bias": np.zeros(pair[1], np.float32),
        }
        for pair in itertools.pairwise(sizes)
    ]


def logits_of(params, x):
    *hidden, last = params
    for layer in hidden:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x @ last["kernel"] + last["bias"]


def loss_fn(params, batch):
    logits = logits_of(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


# %% [markdown]
# ## Training on all devices
#
# `data_parallel` takes the loss and an optax optimizer. Each step takes the whole batch, splits it over the
# devices, and leaves the same parameters on all of them. The caps on buckets are small because the model is; the
# defaults suit models of millions of parameters.


# %%
def batches(epochs, size=128):
    rng = np.random.default_rng(1)
    for _ in range(epochs):
        chosen = rng.permutation(train.stop)
        for start in range(0, train.stop, size):
            rows = chosen[start : start + size]
            yield {"image": images[rows], "label": labels[rows]}


optimizer = optax.adam(3e-3)
trainer = fdp.data_parallel(
    loss_fn, optimizer, bucket_bytes=72 * 1024, first_bucket_bytes=72 * 1024
)
state = trainer.init(init_params(0))
losses = []
for batch in batches(epochs=10):
    state, info = trainer.train_step(state, batch)
    losses.append(float(info.loss))
    if len(losses) % 24 == 0:
        print(f"step {len(losses):3d}  loss {losses[-1]:.3f}")

# %% [markdown]
# ## The same on one device
#
# The mean of eight means over equal shares is the mean over the whole batch, so data parallel training is the
# one-device training, up to the order in which numbers are added. Here is the one-device training, with optax and
# nothing else.


# %%
@jax.jit
def one_device_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


params = init_params(0)
opt_state = optimizer.init(params)
alone = []
for batch in batches(epochs=10):
    params, opt_state, loss = one_device_step(params, opt_state, batch)
    alone.append(float(loss))

difference = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
print(f"losses of {len(losses)} steps equal to 1e-4:", difference < 1e-4)

# %% [markdown]
# ## What crosses between the devices
#
# Gradients cross in *buckets*, in the order in which the backward pass makes them: the last layer's first. The
# plan is made before the first step, from shapes and from the traced gradient.

# %%
plan = trainer.plan(state, batch)
print(plan)

# %%
fdp.inspect.plot_plan(plan)

# %% [markdown]
# A plan is an intention. What the compiler made of it stands in the compiled program, which fdp reads: one
# all-reduce for each bucket, and a small one for the loss. *Can hide it* counts the matmuls that may run while
# the bucket is on its way.

# %%
compiled = trainer.lower(state, batch).compile()
report = fdp.inspect.report(compiled, plan)
for match, bucket in zip(report.buckets, plan.buckets, strict=True):
    carriers = [report.overlaps[i] for i in match.collectives]
    hides = sum(one.flops for one in carriers) / 1e6
    print(
        f"bucket {match.bucket}: {bucket.nbytes:7,} bytes, {match.verdict}, can hide it: {hides:.2f} MFLOP"
    )
print(f"all-reduces in the program: {len(report.collectives)}")

# %% [markdown]
# ## Did it learn?

# %%
scores = logits_of(state.params, images[held_out]).argmax(-1) == labels[held_out]
accuracy = float(scores.mean())
print(f"held-out accuracy: {accuracy:.1%} of {len(scores)} digits")

assert accuracy > 0.95
assert difference < 1e-4, "eight devices do not train as one does"
assert report.all_alone, "the compiler merged buckets"
assert len(report.collectives) == len(plan.buckets) + 1
