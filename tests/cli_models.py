"""A module as somebody has it in their directory, for the tests of the command line."""

import os
import sys

SOURCE = """
import jax
import jax.numpy as jnp
import numpy as np
import optax

print("imported")
WIDTH = 32


def params():
    print("called")
    key = jax.random.key(0)
    return {f"layer_{i}": {"w": jax.random.normal(key, (WIDTH, WIDTH))} for i in (0, 1, 2, 10)}


def loss(params, batch):
    h = batch["x"]
    for i in (0, 1, 2, 10):
        h = jnp.tanh(h @ params[f"layer_{i}"]["w"])
    return jnp.mean((h - batch["y"]) ** 2)


def build():
    x = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
    return loss, params(), {"x": x, "y": np.zeros((64, WIDTH), np.float32)}


def full():
    def with_state(params, batch, *, model_state):
        value = loss(params, batch)
        return value, {"seen": model_state["seen"] + 1.0}, {"value": value}

    options = {"has_model_state": True, "has_aux": True, "model_state": {"seen": jnp.zeros(())}}
    return with_state, *build()[1:], optax.adam(1e-3), options


def carrying():
    return *build(), optax.sgd(0.1), {"carry_over": 1}


def scanned():
    def stacked(params, batch):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], params["layers"])
        return jnp.mean((h @ params["head"] - batch["y"]) ** 2)

    # An iteration's gradients must be worth a reduction.
    shapes = {"layers": (3, 256, 256), "head": (256, 256)}
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
    x = jax.ShapeDtypeStruct((4, 256), jnp.float32)
    return stacked, params, {"x": x, "y": x}, optax.sgd(0.1), {"in_loops": True}


def enormous():
    return {"w": jnp.zeros((10**6, 10**6)), "b": jnp.ones(10**6)}


def closes_over():
    scale = jnp.cumsum(jnp.ones(WIDTH))
    return (lambda p, b: loss(p, b) + jnp.sum(p["layer_0"]["w"] @ scale)), *build()[1:]


def needs_values():
    return params() if jnp.ones(()).sum() > 0 else None


def two():
    return loss, params()


def options_list():
    return (*build(), optax.sgd(0.1), ["has_aux"])


def with_text():
    return {"w": jnp.zeros(3), "name": "dense"}


def integers():
    return {"steps": jnp.zeros(3, jnp.int32)}


def broken():
    return (lambda p, b: b["x"] @ p["layer_0"]["w"][:3]), *build()[1:]


def interrupted():
    raise KeyboardInterrupt


def takes_one(argument):
    return argument


number = 3
"""


def write(folder):
    """Puts the module `a_model`, and modules that cannot be imported, into a folder."""
    (folder / "a_model.py").write_text(SOURCE)
    (folder / "imports_missing.py").write_text("import no_such_package_of_anybody\n")
    (folder / "ends.py").write_text("raise SystemExit('usage: ends')\n")
    (folder / "wrong_syntax.py").write_text("def f(:\n")
    sys.modules.pop("a_model", None)  # of another test


def enter(folder, monkeypatch):
    """Makes `folder`, with the modules, the current directory; what a program may change is put back."""
    write(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    # Of another test, in another folder.
    for name in ("model", "a_model"):
        sys.modules.pop(name, None)
    return folder
