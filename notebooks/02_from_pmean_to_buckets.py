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
# # From `pmean` to buckets
#
# Plain data parallel training in JAX is one line: `grads = jax.lax.pmean(grads, "data")`. This notebook rebuilds
# from it, in about a hundred lines of plain JAX, what fdp does: buckets, in ready order, in an order that the
# compiler keeps. At the end the library does the same, and both gradients and compiled programs are compared.

# %%
# %matplotlib inline
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import fdp

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

# %% [markdown]
# A model of six layers. Its gradients are six matrices of 64 KiB and six vectors of 512 bytes.

# %%
rng = np.random.default_rng(0)
params = [
    {
        "kernel": rng.normal(size=(128, 128)).astype(np.float32) / 11,
        "bias": np.zeros(128, np.float32),
    }
    for _ in range(6)
]
batch = {name: rng.normal(size=(256, 128)).astype(np.float32) for name in "xy"}


def loss_fn(params, batch):
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean((x - batch["y"]) ** 2)


# %% [markdown]
# ## 1. `pmean`
#
# Each device differentiates the loss of its share, and `pmean` averages. (The `pcast` tells JAX that parameters
# may differ between devices; without it JAX would sum the gradients by itself.)


# %%
def compile_with(reduce):
    def step(params, batch):
        local = lax.pcast(params, "data", to="varying")
        return reduce(jax.grad(loss_fn)(local, batch))

    step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    return jax.jit(step).lower(params, batch).compile()


def all_reduces(compiled):
    return [c.nbytes for c in fdp.inspect.collectives(compiled)]


with_pmean = compile_with(lambda grads: lax.pmean(grads, "data"))
print("all-reduces, bytes:", all_reduces(with_pmean))

# %% [markdown]
# One all-reduce. The source asks for twelve, one a leaf, but XLA merges all-reduces that do not depend on each
# other, up to a limit that no model of this size reaches. The merged one needs *all* gradients, so it starts when
# the backward pass is over, and there is nothing left to run beside it.
#
# ## 2. Buckets
#
# DDP's answer: cut the list of gradients in buckets of bounded size, in the order in which the backward pass
# makes them, so that the last layer comes first. For layers in a row that is the reverse of the order in the
# tree.


# %%
def make_buckets(leaves, cap):
    """Lists of leaf numbers, last leaf first; no bucket of several leaves exceeds `cap` bytes."""
    buckets, size = [], 0
    for i in reversed(range(len(leaves))):
        nbytes = leaves[i].size * leaves[i].dtype.itemsize
        if not buckets or size + nbytes > cap:
            buckets.append([])
            size = 0
        buckets[-1].append(i)
        size += nbytes
    return buckets


CAP = 130 * 1024
make_buckets(jax.tree.leaves(params), CAP)

# %% [markdown]
# Pack each bucket in one flat array, divide, sum over the devices, unpack. Dividing first keeps a float16 sum
# from overflowing where its mean would not.


# %%
def pack(leaves, bucket):
    n = lax.axis_size("data")
    return jnp.concatenate([leaves[i].ravel() / n for i in bucket])


def unpack(flat, leaves, bucket):
    ends = np.cumsum([leaves[i].size for i in bucket])[:-1]
    parts = jnp.split(flat, ends)
    return {i: part.reshape(leaves[i].shape) for i, part in zip(bucket, parts, strict=True)}


def in_buckets(grads):
    leaves, treedef = jax.tree.flatten(grads)
    reduced = {}
    for bucket in make_buckets(leaves, CAP):
        reduced |= unpack(lax.psum(pack(leaves, bucket), "data"), leaves, bucket)
    return jax.tree.unflatten(treedef, [reduced[i] for i in range(len(leaves))])


naive = compile_with(in_buckets)
print("all-reduces, bytes:", all_reduces(naive))

# %% [markdown]
# Three buckets in the source, and one all-reduce in the program: XLA has merged them again. Writing buckets down
# is not having them.
#
# ## 3. An order that no compiler undoes
#
# What XLA cannot merge is an all-reduce that *needs the result* of another. So let each bucket depend on the one
# before, without changing a bit of it: write its first element as `where(token > inf, 0, element)`, where the
# token is an element of the previous bucket's result. Nothing is above infinity, not even NaN, so the element
# always stays; but the compiler does not know that.


# %%
def after(flat, token):
    """`flat`, bit for bit, but not before `token` exists."""
    if token is None:
        return flat
    return flat.at[0].set(jnp.where(token > jnp.inf, 0, flat[0]))


def in_ordered_buckets(grads):
    leaves, treedef = jax.tree.flatten(grads)
    reduced, token = {}, None
    for bucket in make_buckets(leaves, CAP):
        summed = lax.psum(after(pack(leaves, bucket), token), "data")
        token = summed[0]
        reduced |= unpack(summed, leaves, bucket)
    return jax.tree.unflatten(treedef, [reduced[i] for i in range(len(leaves))])


ordered = compile_with(in_ordered_buckets)
print("all-reduces, bytes:", all_reduces(ordered))

# %% [markdown]
# Three all-reduces, in the order in which their gradients are born. While the first is on its way, the backward
# pass of the layers before it can run. In the program's schedule, `[]` is an all-reduce, `G` a matmul and `f`
# other compute:

# %%
for name, compiled in {"pmean": with_pmean, "naive": naive, "ordered": ordered}.items():
    print(f"{name:8}", fdp.inspect.interleaving(compiled))

# %% [markdown]
# On CPU the text is one order out of many that the runtime may take. How much could hide each all-reduce,
# whatever the order, is the work of the matmuls that neither need it nor are needed by it:

# %%
for name, compiled in {"pmean": with_pmean, "ordered": ordered}.items():
    flops = [f"{one.flops / 1e6:.1f}" for one in fdp.inspect.overlap(compiled)]
    print(f"{name:8} MFLOP beside each all-reduce:", ", ".join(flops))

# %% [markdown]
# ## 4. The library
#
# `fdp.reduce_gradients` takes the place of `pmean`. Told the same cap, it makes the same buckets. (What it does
# beyond the hundred lines: it reads the ready order from the traced gradient, reduces inside `lax.scan`, keeps
# dtypes apart, and chooses packing and dependency by platform.)

# %%
plan = fdp.plan_buckets(params, bucket_bytes=CAP, first_bucket_bytes=CAP)
with_fdp = compile_with(functools.partial(fdp.reduce_gradients, axis_name="data", plan=plan))
print(plan)

# %%
fdp.inspect.plot_plan(plan)

# %%
wanted, ours, theirs = (f(params, batch) for f in (with_pmean, ordered, with_fdp))


def largest_difference(a, b):
    return max(
        float(jnp.abs(x - y).max())
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


print("all-reduces of the library, bytes:", all_reduces(with_fdp))
print("gradients equal bit for bit:", largest_difference(ours, theirs) == 0.0)
print("as those of pmean, to 1e-8:", largest_difference(ours, wanted) < 1e-8)

buckets = make_buckets(jax.tree.leaves(params), CAP)
assert [tuple(bucket) for bucket in buckets] == [bucket.leaf_indices for bucket in plan.buckets]
assert all_reduces(ordered) == all_reduces(with_fdp) == [bucket.nbytes for bucket in plan.buckets]
assert len(all_reduces(with_pmean)) == len(all_reduces(naive)) == 1
assert largest_difference(ours, theirs) == 0.0
assert largest_difference(ours, wanted) < 1e-8
