"""before.py with fdp: gradients cross in buckets, ordered so that they can overlap the backward pass."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import fdp


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(features=16, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(features=64)(x))
        return nn.Dense(features=10)(x)


def create_train_state(key, learning_rate, momentum):
    cnn = CNN()
    params = cnn.init(key, jnp.ones((1, 8, 8, 1)))["params"]
    tx = optax.sgd(learning_rate, momentum)
    return TrainState.create(apply_fn=cnn.apply, params=params, tx=tx)


def train_step(state, images, labels):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads = fdp.reduce_gradients(grads, axis_name="data")
    loss = jax.lax.pmean(loss, axis_name="data")
    return state.apply_gradients(grads=grads), loss


def main(epochs=2, batch_size=256):
    images, labels = load_digits(return_X_y=True)
    images = np.float32(images).reshape(-1, 8, 8, 1) / 16
    state = jax_utils.replicate(create_train_state(jax.random.key(0), 0.1, 0.9))
    p_train_step = jax.pmap(train_step, axis_name="data")
    rng = np.random.default_rng(0)
    losses = []
    for epoch in range(epochs):
        order = rng.permutation(len(images))
        for start in range(0, len(images) - batch_size + 1, batch_size):
            batch = order[start : start + batch_size].reshape(jax.device_count(), -1)
            state, loss = p_train_step(state, images[batch], labels[batch])
            losses.append(float(loss[0]))
        print(f"epoch {epoch + 1}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
