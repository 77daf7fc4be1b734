"""The steps that 03_seeing_the_overlap looks at, and their compiled texts for hardware that is not here.

    make test-aot                                # makes .venv-aot, with the compilers
    .venv-aot/bin/python notebooks/programs.py   # writes recorded/ anew

A notebook then needs no compiler but the CPU's to show what the others make of the same steps.
"""

import functools
import gzip
import itertools
import os
import re
from pathlib import Path

if __name__ == "__main__":
    # Before jax starts; the same as fdp.aot.ENVIRONMENT, which cannot be asked, for it imports jax.
    os.environ.update(
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
    )

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import fdp

RECORDED = Path(__file__).parent / "recorded"
TARGETS = {"h100": "h100:8", "v5e": "v5e:2x4"}
MODELS = ("unrolled", "scanned")
WAYS = ("pmean", "fdp")

LAYERS, WIDTH, ROWS = 8, 2048, 4096  # rows: examples on each device
CAP = 16 * 2**20  # bytes of a bucket: one layer's gradient
OPTIMIZER = optax.sgd(0.1)


def layer(x, kernel):
    """Products in bfloat16, as on an accelerator they would be."""
    return jnp.tanh(jnp.dot(x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)))


def mean_square(x, batch):
    return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)


def unrolled(kernels, batch):
    """Eight layers, one after the other: a list of kernels."""
    return mean_square(functools.reduce(layer, kernels, batch["x"]), batch)


def scanned(kernels, batch):
    """The same layers as a loop over one stacked array of kernels."""
    x = batch["x"].astype(jnp.bfloat16)
    return mean_square(lax.scan(lambda x, kernel: (layer(x, kernel), None), x, kernels)[0], batch)


LOSSES = {"unrolled": unrolled, "scanned": scanned}


def shapes(model, devices):
    """Parameters and batch as shapes: nothing is allocated."""
    rows = jax.ShapeDtypeStruct((ROWS * devices, WIDTH), np.float32)
    kernels = (
        [jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)] * LAYERS
        if model == "unrolled"
        else jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), np.float32)
    )
    return kernels, {"x": rows, "y": rows}


def trainer_for(model, mesh):
    return fdp.data_parallel(
        LOSSES[model], OPTIMIZER, mesh=mesh, bucket_bytes=CAP, first_bucket_bytes=CAP
    )


def lower(model, way, mesh):
    """The whole train step, not compiled yet: with fdp, or with jax.lax.pmean and nothing else."""
    params, batch = shapes(model, mesh.size)
    if way == "fdp":
        trainer = trainer_for(model, mesh)
        return trainer.lower(trainer.init(params), batch)

    def step(params, opt_state, batch):
        local = jax.lax.pcast(params, "data", to="varying")
        grads = jax.lax.pmean(jax.grad(LOSSES[model])(local, batch), "data")
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    P = PartitionSpec
    everywhere = NamedSharding(mesh, P())
    params, batch = (
        jax.tree.map(lambda x, s=s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree)
        for tree, s in ((params, everywhere), (batch, NamedSharding(mesh, P("data"))))
    )
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=(P(), P()))
    opt_state = jax.eval_shape(OPTIMIZER.init, params)
    return jax.jit(mapped, donate_argnums=(0, 1)).lower(params, opt_state, batch)


def record_of(model, way, target):
    return RECORDED / f"{target}.{model}.{way}.hlo.txt.gz"


def recorded(model, way, target):
    """The compiled text of ``lower(model, way, mesh)`` for ``"h100"`` or ``"v5e"``, as `main` wrote it."""
    return gzip.decompress(record_of(model, way, target).read_bytes()).decode()


def without_sources(text):
    """Less what names the files and the functions of the machine that compiled it."""
    tables = r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*\n*"
    text = re.sub(tables, "", text, flags=re.MULTILINE)
    return re.sub(r' ?(?:op_name="[^"]*"|stack_frame_id=\d+)', "", text)


def main():
    RECORDED.mkdir(exist_ok=True)
    for target, topology in TARGETS.items():
        mesh = fdp.aot.mesh(topology)
        for model, way in itertools.product(MODELS, WAYS):
            text = without_sources(lower(model, way, mesh).compile().as_text())
            path = record_of(model, way, target)
            path.write_bytes(gzip.compress(text.encode(), mtime=0))
            print(f"{path.name}: {path.stat().st_size:,} bytes", fdp.inspect.interleavings(text))


if __name__ == "__main__":
    main()
