"""Errors about data, agreement and verification. Run by ``test_messages``."""

import jax
import jax.numpy as jnp
import numpy as np
from message_cases_plan import Case

from fdp import agree, check_replicas
from fdp.data import check_batch, epoch_indices, join, pad_batch, replica_count

BATCH = {"x": np.zeros((3, 2))}
MESH = jax.sharding.AbstractMesh((2,), ("batch",))


def indices(size=10, **options):
    return epoch_indices(size, **{"epoch": 0, "process": 0, "process_count": 2, **options})


CASES = {
    "no batch at all": Case(
        lambda: check_batch({}, 2, 1),
        ValueError,
        ("expected a batch with at least one array", "got an empty tree"),
    ),
    "batch leaf is a scalar": Case(
        lambda: check_batch({"x": np.zeros(4), "t": 1.0}, 2, 1),
        ValueError,
        ("leading axis of examples", "a scalar at 't'", "close over constants"),
    ),
    "batch leaves disagree": Case(
        lambda: check_batch({"x": np.zeros(4), "y": np.zeros(3)}, 2, 1),
        ValueError,
        ("the same number of examples", "got 4 at 'x' and 3 at 'y'"),
    ),
    "batch does not divide": Case(
        lambda: check_batch({"x": np.zeros(7)}, 2, 2),
        ValueError,
        ("2 replicas x 2 microbatches = 4", "got 7 examples", "nearest sizes are 4 or 8"),
    ),
    "mesh without the axis": Case(
        lambda: replica_count(MESH, "data"),
        ValueError,
        ("expected a mesh with axis 'data'", "got axes ('batch',)", "pass axis_name="),
    ),
    "index arguments of another type": Case(
        lambda: indices(10.0),
        TypeError,
        ("expected size to be a whole number", "got 10.0 of type float", "pass an int"),
    ),
    "an empty data set": Case(
        lambda: indices(0),
        ValueError,
        ("expected size to be at least 1", "got 0"),
    ),
    "a negative epoch": Case(
        lambda: indices(epoch=-1),
        ValueError,
        ("expected epoch to be at least 0", "got -1"),
    ),
    "a process that is none": Case(
        lambda: indices(process=2),
        ValueError,
        ("expected process to be below process_count=2", "got 2", "process=jax.process_index()"),
    ),
    "drop_last leaves nothing": Case(
        lambda: indices(7, batch_size=4, drop_last=True),
        ValueError,
        ("2 processes x 4 examples = 8 examples", "got 7", "drop_last=False"),
    ),
    "pad to nothing": Case(
        lambda: pad_batch(BATCH),
        TypeError,
        ("expected one of size= and multiple_of=", "got size=None", "pad_batch(batch, 64)"),
    ),
    "pad to a fraction": Case(
        lambda: pad_batch(BATCH, multiple_of=2.5),
        TypeError,
        ("expected multiple_of to be a whole number from 1", "got 2.5", "multiple_of=8"),
    ),
    "pad an empty batch": Case(
        lambda: pad_batch({"x": np.zeros((0, 2))}, 4),
        ValueError,
        ("at least one example, got 0", "like=example_batch"),
    ),
    "pad to less": Case(
        lambda: pad_batch(BATCH, 2),
        ValueError,
        ("at most size=2 examples, got 3", "raise size, or split the batch"),
    ),
    "join what cannot be iterated": Case(
        lambda: join(3),
        TypeError,
        ("expected batches to be an iterable", "got 3", "pass a list or a generator"),
    ),
    "join without looking ahead": Case(
        lambda: join([], lookahead=0),
        ValueError,
        ("expected lookahead to be a whole number of steps from 1", "got 0", "lookahead=1"),
    ),
    "agree on a function": Case(
        lambda: agree({"loss": len}),
        TypeError,
        ("expected fact 'loss' to be text", "got <built-in function len>", "as text"),
    ),
    "no patience": Case(
        lambda: agree({}, timeout=0),
        ValueError,
        ("expected timeout to be a positive number of seconds", "got 0", "timeout=60"),
    ),
    "verify under jit": Case(
        lambda: jax.jit(check_replicas)({"w": jnp.ones(3)}),
        TypeError,
        ("expected arrays, got", "'w'", "outside jax.jit"),
    ),
}
