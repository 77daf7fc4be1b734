"""fdp against torch: unused parameters, ranks that run out of data, buffers. See ``test_torch_oracle``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.torch_recorded import (
    RATE,
    arrays,
    close,
    coefficients,
    departs,
    errors,
    examples,
    leaves_loss,
    listed,
    moved,
    plane,
    recorded,
    three,
    trainer,
)


def steps_of_unused(**options):
    sgd = optax.chain(optax.add_decayed_weights(0.25), optax.sgd(0.5, momentum=0.5))
    the = trainer(2, leaves_loss, sgd, **options)
    state = the.init(three())
    for use in ([True, True], [False, False], [True, False]):
        state, _ = the.train_step(state, coefficients(2, use))
        trace = optax.tree.get(state.opt_state, "trace")
        yield jax.tree.map(np.asarray, (state.params, trace))


def assert_unused_like(torchs, **options):
    for got, want in zip(steps_of_unused(**options), torchs, strict=True):
        close(got, (listed(want["values"]), listed(want["momentum"])), tolerance=0)


def test_p2_unused_skip_leaves_values_and_momentum_as_torch_does():
    for rank in recorded("unused"):
        assert_unused_like(rank["set_to_none"], unused="skip")


@departs("unused-parameters-get-zeros-unless-asked")
def test_unused_parameters_get_zeros_unless_asked():
    """The default is torch's result with ``zero_grad(set_to_none=False)``, which is not torch's default."""
    for rank in recorded("unused"):
        assert_unused_like(rank["zeroed"])
        none = rank["set_to_none"][1]
        assert none["grads"][1] is None
        assert none["values"] != rank["zeroed"][1]["values"]


@departs("a-mean-over-users-can-be-asked-for")
def test_a_mean_over_users_can_be_asked_for():
    """Rank 0 alone used leaf 1, with gradient 4: torch divides by all ranks."""
    assert recorded("unused")[0]["set_to_none"][2]["grads"][1] == [2.0, 2.0]
    for options, want in (({}, 2.0), ({"mean_over": "users"}, 4.0)):
        the = trainer(2, leaves_loss, optax.sgd(1.0), **options)
        params = three()
        state, _ = the.train_step(the.init(params), coefficients(2, [True, False]))
        close(moved(params, state)[1], np.full(2, want), tolerance=0)


def masked_loss(params, batch):
    return (errors(params, batch["x"]) * batch["mask"]).sum(), batch["mask"].sum()


@departs("a-replica-without-data-does-not-count")
def test_a_replica_without_data_does_not_count():
    """Rank 0 has two batches, rank 1 three. torch's join divides by both to the end, unless told otherwise."""
    the = trainer(2, masked_loss, optax.sgd(RATE), weighted=True)
    state, grads = the.init(plane()), []
    for step in range(3):
        before = jax.tree.map(np.asarray, state.params)
        mask = np.repeat([float(step < 2), 1.0], 2).astype(np.float32)
        state, _ = the.train_step(state, {"x": examples(2, step), "mask": mask})
        grads.append(moved(before, state, RATE))
    live, initial = (recorded("join")[1][divided] for divided in ("live", "initial"))
    for got, want in zip(grads, live["grads"], strict=True):
        close(got, arrays(want), tolerance=2e-4)
    for rank in recorded("join"):  # torch sends the last rank's values to all
        close(state.params, arrays(rank["live"]["values"]))
    close(arrays(live["grads"][2]), {k: 2 * x for k, x in arrays(initial["grads"][2]).items()})
    assert np.abs(arrays(live["grads"][2])["v"]).max() > 1


def counting_loss(params, batch, *, model_state):
    amount = 1 + batch["rank"][0]
    new = {"average": model_state["average"] + amount, "count": model_state["count"] + amount}
    return (params["w"] * batch["x"]).mean(), new


def counted(policy=None):
    """The model state before and after two steps, and the last state."""
    options = {} if policy is None else {"model_state_policy": policy}
    the = trainer(2, counting_loss, optax.sgd(0.0), has_model_state=True, **options)
    start = {"average": jnp.array([10.0]), "count": jnp.array(100)}
    state = the.init({"w": jnp.ones(1)}, model_state=start)
    batch = {"x": np.ones((2, 1), np.float32), "rank": np.arange(2, dtype=np.int32)}
    seen = [start]
    for _ in range(2):
        state, _ = the.train_step(state, batch)
        local = state.local_model_state
        seen.append(jax.tree.map(np.asarray, state.model_state if local is None else local))
    return seen, state


def test_p43_rank_zeros_buffers_when_asked_for():
    seen, _ = counted("from_rank0")
    for got, (average, count) in zip(seen, recorded("buffers")[0]["from rank 0"], strict=True):
        close((got["average"], got["count"]), listed((average, count)), tolerance=0)


@departs("model-state-is-averaged")
def test_model_state_is_averaged():
    """The other rank's 12 is lost in torch; integers are rank 0's in both."""
    seen, _ = counted()
    torchs = recorded("buffers")[0]["from rank 0"]
    assert [average for average, _ in torchs] == [[10.0], [11.0], [12.0]]
    assert [float(got["average"][0]) for got in seen] == [10.0, 11.5, 13.0]
    assert [int(got["count"]) for got in seen] == [count for _, count in torchs]


@departs("model-state-is-the-same-after-a-step")
def test_model_state_is_the_same_after_a_step():
    """torch sends buffers before the next forward: what is saved or evaluated after a step differs by rank."""
    first, second = (rank["from rank 0"][-1] for rank in recorded("buffers"))
    assert (first[0], second[0]) == ([12.0], [13.0])
    _, state = counted()
    for leaf in jax.tree.leaves(state.model_state):
        values = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
        assert (len(leaf.addressable_shards), len(values)) == (2, 1)


def test_local_buffers_when_asked_for():
    """From one start, by the same amounts; torch without its broadcast does not even start from rank 0's."""
    seen, _ = counted("local")
    for r, rank in enumerate(recorded("buffers")):
        (start, _), *torchs = rank["local"]
        by = [average[0] - start[0] for average, _ in torchs]
        assert [float(got["average"][r, 0]) - 10 for got in seen[1:]] == by
