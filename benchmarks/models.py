"""The models whose steps are compiled for hardware that is not here, as shapes: nothing is allocated.

An MLP of twenty equal layers; ResNet-50 with its batch statistics as model state; a GPT of twelve layers, written one
after the other and as a scan over layers, with and without remat. Kernels are float32 and products bfloat16, as on an
accelerator they would be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fdp

HALF = jnp.bfloat16


class Model(NamedTuple):
    """A model and what it is trained with.

    Attributes:
      loss: `(params, batch) -> loss`, or with model state `(params, batch, *, model_state) -> (loss, model_state)`.
      params: shapes.
      model_state: shapes, or None.
      batch: shapes of one replica's batch.
      optimizer: an optax optimizer.
    """

    loss: Callable[..., Any]
    params: Any
    model_state: Any
    batch: dict[str, jax.ShapeDtypeStruct]
    optimizer: optax.GradientTransformation


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    ).mean()


class MLP(nn.Module):
    layers: int = 20
    width: int = 512

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = nn.gelu(nn.Dense(self.width, use_bias=False, dtype=HALF)(x))
        return x


class Block(nn.Module):
    """A transformer layer: causal attention, then two dense layers, with the norms in front."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.DenseGeneral, dtype=HALF)
        y = nn.LayerNorm(dtype=HALF)(x)
        shape = (3, self.heads, self.width // self.heads)
        q, k, v = jnp.moveaxis(dense(shape, name="qkv")(y), -3, 0)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + dense(self.width, axis=(-2, -1), name="out")(y)
        y = nn.LayerNorm(dtype=HALF)(x)
        y = nn.gelu(dense(4 * self.width, name="up")(y))
        return x + dense(self.width, name="down")(y)


class Carried(Block):
    """The same as the body of a scan."""

    @nn.compact
    def __call__(self, x, _):
        return super().__call__(x), None


class GPT(nn.Module):
    """Twelve layers between an embedding and a head; `scan` writes them as a loop, `remat` computes them twice."""

    layers: int = 12
    width: int = 512
    heads: int = 8
    words: int = 8192
    scan: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.words, self.width, dtype=HALF, name="embed")(tokens)
        x = x + self.param("position", nn.initializers.zeros, (tokens.shape[1], self.width))
        x = x.astype(HALF)
        if self.scan:
            body = nn.remat(Carried, prevent_cse=False) if self.remat else Carried
            layers = nn.scan(
                body, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
            )
            x, _ = layers(self.width, self.heads, name="layers")(x, None)
        else:
            block = nn.remat(Block) if self.remat else Block
            for i in range(self.layers):
                x = block(self.width, self.heads, name=f"layer_{i}")(x)
        x = nn.LayerNorm(dtype=HALF, name="norm")(x)
        return nn.Dense(self.words, use_bias=False, dtype=HALF, name="head")(x)


class Bottleneck(nn.Module):
    """He et al., "Deep Residual Learning for Image Recognition", 2016, figure 5, with the stride in the 3x3."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=HALF)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=HALF)
        strides = (self.stride, self.stride)
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.features, (3, 3), strides)(y)))
        y = norm()(conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.features, (1, 1), strides)(x))
        return nn.relu(x + y)


class ResNet50(nn.Module):
    classes: int = 1000

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(64, (7, 7), (2, 2), use_bias=False, dtype=HALF)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=HALF)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for i in range(blocks):
                x = Bottleneck(64 * 2**stage, 2 if stage and not i else 1)(x)
        return nn.Dense(self.classes, dtype=HALF)(x.mean((1, 2)))


def mlp(layers: int = 20, width: int = 512, rows: int = 512) -> Model:
    module = MLP(layers, width)

    def loss(params, batch):
        y = module.apply({"params": params}, batch["x"])
        return jnp.mean((y.astype(jnp.float32) - batch["y"]) ** 2)

    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    return Model(loss, _init(module, x)["params"], None, {"x": x, "y": x}, optax.sgd(0.1))


def gpt(*, rows: int = 4, words: int = 256, **options: Any) -> Model:
    module = GPT(**options)

    def loss(params, batch):
        logits = module.apply({"params": params}, batch["tokens"])
        return cross_entropy(logits, batch["labels"])

    x = jax.ShapeDtypeStruct((rows, words), jnp.int32)
    params = _init(module, x)["params"]
    return Model(loss, params, None, {"tokens": x, "labels": x}, optax.sgd(0.1))


def resnet50(images: int = 8, pixels: int = 64) -> Model:
    module = ResNet50()

    def loss(params, batch, *, model_state):
        logits, new = module.apply(
            {"params": params, "batch_stats": model_state}, batch["image"], mutable=["batch_stats"]
        )
        return cross_entropy(logits, batch["label"]), new["batch_stats"]

    x = jax.ShapeDtypeStruct((images, pixels, pixels, 3), jnp.float32)
    label = jax.ShapeDtypeStruct((images,), jnp.int32)
    made = _init(module, x)
    batch = {"image": x, "label": label}
    return Model(loss, made["params"], made["batch_stats"], batch, optax.sgd(0.1))


BUILDERS: dict[str, Callable[[], Model]] = {
    "mlp": mlp,
    "resnet50": resnet50,
    "gpt": gpt,
    "gpt scanned": functools.partial(gpt, scan=True),
    "gpt scanned remat": functools.partial(gpt, scan=True, remat=True),
}


def lower(model: Model, mesh: Mesh, **options: Any) -> tuple[jax.stages.Lowered, fdp.BucketPlan]:
    """The step of `fdp.data_parallel` and its plan."""
    trainer = fdp.data_parallel(
        model.loss,
        model.optimizer,
        mesh=mesh,
        has_model_state=model.model_state is not None,
        **options,
    )
    state = trainer.init(model.params, model_state=model.model_state)
    batch = _for_all(model.batch, mesh)
    return trainer.lower(state, batch), trainer.plan(state, batch)


def lower_plain(
    model: Model, mesh: Mesh, compiler_options: dict[str, str] | None = None
) -> jax.stages.Lowered:
    """The same step in plain JAX: one `pmean` of everything, after the gradient."""

    def step(params, opt_state, model_state, batch):
        def loss(params):
            if model_state is None:
                return model.loss(params, batch), None
            return model.loss(params, batch, model_state=model_state)

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        value, new, grads = lax.pmean((value, new, grads), "data")
        updates, opt_state = model.optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, new), value

    everywhere = PartitionSpec()
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(everywhere, everywhere, everywhere, PartitionSpec("data")),
        out_specs=everywhere,
        # With the check on, JAX would add a reduction of its own for every use of a parameter.
        check_vma=False,
    )
    jitted = jax.jit(mapped, donate_argnums=(0, 1, 2), compiler_options=compiler_options)
    opt_state = jax.eval_shape(model.optimizer.init, model.params)
    state = _placed((model.params, opt_state, model.model_state), mesh, everywhere)
    return jitted.lower(*state, _placed(_for_all(model.batch, mesh), mesh, PartitionSpec("data")))


def _for_all(batch: Any, mesh: Mesh) -> Any:
    """The batch of all replicas, given that of one."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] * mesh.size, *x.shape[1:]), x.dtype), batch
    )


def _placed(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _init(module: nn.Module, x: jax.ShapeDtypeStruct) -> Any:
    return jax.eval_shape(module.init, jax.random.key(0), x)
