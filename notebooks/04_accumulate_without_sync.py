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
# # Accumulate without sync
#
# A large batch can be run in several passes, and only the sum of their gradients is needed everywhere. DDP calls
# it `no_sync`: communicate once in a while. This notebook counts what a step communicates, in the compiled
# program, and then looks at what fewer updates do to training.

# %%
# %matplotlib inline
import jax
import jax.numpy as jnp
import numpy as np
import optax
from IPython.display import display
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import fdp

jax.config.update("jax_num_cpu_devices", 8)
mesh = Mesh(np.array(jax.devices()), ("data",))

# %% [markdown]
# Handwritten digits, and a network of two hidden layers.

# %%
digits = load_digits()
shuffled = np.random.default_rng(0).permutation(len(digits.target))
images = (digits.data[shuffled] / 16).astype(np.float32)
labels = digits.target[shuffled].astype(np.int32)
TRAIN, PASS = 1536, 96  # images to train on, and in one pass: twelve on each device


def init_params():
    rng = np.random.default_rng(0)
    shapes = [(64, 128), (128, 128), (128, 10)]
    return [(rng.normal(size=s) / np.sqrt(s[0])).astype(np.float32) for s in shapes]


def loss_fn(params, batch):
    x = batch["image"]
    for kernel in params[:-1]:
        x = jnp.tanh(x @ kernel)
    logits = x @ params[-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def take(rows):
    return {"image": images[rows], "label": labels[rows]}


optimizer = optax.sgd(0.04, momentum=0.9)


def trainer_with(**options):
    return fdp.data_parallel(loss_fn, optimizer, mesh=mesh, bucket_bytes=2**16, **options)


# %% [markdown]
# ## What a step communicates
#
# With `num_microbatches=k` each device runs its share in `k` slices and reduces once. The program says so: the
# number of all-reduces and their bytes do not depend on `k`.


# %%
def communication(compiled):
    """All-reduces in one step, and the bytes that each device puts into them."""
    found = fdp.inspect.collectives(compiled)
    return sum(c.runs for c in found), sum(c.runs * c.nbytes for c in found)


counted = {}
print("slices  examples  all-reduces   bytes  bytes an example")
for k in (1, 2, 4, 8):
    trainer = trainer_with(num_microbatches=k)
    batch = take(np.arange(PASS * k))
    compiled = trainer.lower(trainer.init(init_params()), batch).compile()
    counted[k] = times, nbytes = communication(compiled)
    print(f"{k:6}{PASS * k:10}{times:13}{nbytes:8,}{nbytes / (PASS * k):18,.0f}")

# %% [markdown]
# Left to automatic sharding, a loop over slices communicates in each iteration: the gradient of a slice is that
# of a mean over *all* devices' examples, and the compiler makes it complete before it is added up.


# %%
@jax.jit
def automatic(params, slices):
    def one(total, batch):
        return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(params, batch)), None

    return lax.scan(one, jax.tree.map(jnp.zeros_like, params), slices)[0]


slices = jax.tree.map(lambda x: x.reshape(8, PASS, *x.shape[1:]), take(np.arange(8 * PASS)))
params = jax.device_put(init_params(), NamedSharding(mesh, P()))
slices = jax.device_put(slices, NamedSharding(mesh, P(None, "data")))
by_itself = communication(automatic.lower(params, slices).compile())
print(f"8 slices, automatic sharding: {by_itself[0]} all-reduces, {by_itself[1]:,} bytes")
print(f"8 slices, fdp:                {counted[8][0]} all-reduces, {counted[8][1]:,} bytes")

# %% [markdown]
# ## `no_sync_step`
#
# Where the passes come one by one, `no_sync_step` holds its gradients back on each device and communicates
# nothing. The next `train_step` reduces the sum and updates once. As in PyTorch, gradients of the window are
# *added*; microbatches are averaged.

# %%
every_pass = trainer_with()
state = every_pass.init(init_params())
silent = every_pass.lower(state, take(np.arange(PASS)), sync=False).compile()
print("all-reduces in a no_sync_step:", communication(silent)[0])

# %% [markdown]
# Four passes with one update are one step on the four batches together, with a quarter of the learning rate
# because of the sum:


# %%
def quarter(updates):
    return optax.chain(updates, optax.scale(0.25))


window = fdp.data_parallel(loss_fn, quarter(optimizer), mesh=mesh)
state = window.init(init_params())
for i in range(4):
    step = window.train_step if i == 3 else window.no_sync_step
    state, _ = step(state, take(np.arange(PASS) + i * PASS))

joined = trainer_with(num_microbatches=4)
other, _ = joined.train_step(joined.init(init_params()), take(np.arange(4 * PASS)))
difference = max(
    float(jnp.abs(a - b).max()) for a, b in zip(state.params, other.params, strict=True)
)
print("the same parameters, to 1e-6:", difference < 1e-6)

# %% [markdown]
# ## What it does to training
#
# The same images in the same order, updated after every pass, or after 2, 4 or 8 (`no_sync_2` and so on): a half,
# a quarter, an eighth of the communication, and of the updates.

# %%
EPOCHS = 6
everything = take(np.arange(TRAIN))
training_loss = jax.jit(loss_fn)


def train(every):
    """Training loss at the start and after each epoch; and the state."""
    state = every_pass.init(init_params())
    rng = np.random.default_rng(1)
    losses = [float(training_loss(jax.device_get(state.params), everything))]
    for _ in range(EPOCHS):
        order = rng.permutation(TRAIN).reshape(-1, PASS)
        for i, rows in enumerate(order, start=1):
            step = every_pass.no_sync_step if i % every else every_pass.train_step
            state, _ = step(state, take(rows))
        losses.append(float(training_loss(jax.device_get(state.params), everything)))
    return losses, state


curves, states = {}, {}
for every in (1, 2, 4, 8):
    curves[every], states[every] = train(every)

# %%
figure = Figure(figsize=(8, 4), layout="constrained")
axes = figure.subplots()
looks = {1: ("o-", "black"), 2: ("s--", "#1f4e79"), 4: ("^-.", "#6f8fae"), 8: ("D:", "#444444")}
for every, (style, ink) in looks.items():
    name = "every pass" if every == 1 else f"no_sync_{every}"
    seen = np.arange(EPOCHS + 1) * TRAIN
    face = "white" if every in (2, 8) else ink
    axes.plot(seen, curves[every], style, color=ink, markerfacecolor=face, label=name)
axes.set_xlabel("examples seen")
axes.set_ylabel("training loss")
axes.set_yscale("log")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
display(figure)

# %% [markdown]
# Because gradients are added, a window of `k` takes a step that is about `k` times as long: the learning rate
# grows with the batch, as is often done by hand. How far that carries depends on the model and the learning rate;
# here it is.

# %%
test = take(np.arange(TRAIN, len(labels)))


def accuracy(params):
    x = test["image"]
    for kernel in params[:-1]:
        x = jnp.tanh(x @ kernel)
    return float(((x @ params[-1]).argmax(-1) == test["label"]).mean())


print("updated every  updates  all-reduces  training loss  held-out accuracy")
for every, state in states.items():
    updates = int(state.step)
    row = f"{every:13}{updates:9}{updates * counted[1][0]:13}{curves[every][-1]:15.3f}"
    print(f"{row}{accuracy(jax.device_get(state.params)):19.1%}")

assert len(set(counted.values())) == 1, "communication depends on the number of slices"
assert communication(silent) == (0, 0)
assert by_itself[1] > 7 * counted[8][1]
assert difference < 1e-6
assert all(int(state.step) == EPOCHS * TRAIN // PASS // every for every, state in states.items())
assert all(losses[-1] < losses[0] / 5 for losses in curves.values())
assert curves[8][-1] > curves[1][-1], "fewer updates learned more from the same images"
