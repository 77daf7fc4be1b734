"""Eight fake CPU devices for every test, and the mesh over them."""

import os

# Before JAX is imported, and for the processes that tests start: a test means the CPU unless the
# caller says otherwise. `make test-device` sets the variable to nothing: JAX picks the accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import numpy as np
import pytest

# Before the first device is asked for; JAX raises if that is too late.
jax.config.update("jax_num_cpu_devices", 8)

# No deadline: the first example of a test compiles, the others do not. The same examples in every
# run: a failure that somebody else cannot repeat helps nobody.
hypothesis.settings.register_profile("fdp", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fdp")


@pytest.fixture(scope="session")
def mesh() -> jax.sharding.Mesh:
    """A mesh of eight CPU devices with one axis, "data"."""
    return jax.sharding.Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
