"""Losses over scanned layers, one for each way a gradient can come out of a loop.

A case is ``(loss, params, where)``: ``where`` says of each leaf "loop N", or words of the reason why it is reduced
outside of loops.
"""

import jax
import jax.numpy as jnp
from intercept_helpers import integers
from jax import lax

LAYERS, WIDTH = 4, 4
CASES = {}


def case(**options_of_variant):
    """Registers a function that builds a case; variants get their keyword arguments."""

    def register(build):
        name = build.__name__.replace("_", " ")
        if not options_of_variant:
            CASES[name] = build
        for variant, options in options_of_variant.items():
            CASES[f"{name}, {variant.replace('_', ' ')}"] = lambda options=options: build(**options)
        return build

    return register


def weights(key=0, layers=LAYERS):
    return {
        "b": integers(key, layers, WIDTH),
        "w": integers(key + 1, layers, WIDTH, WIDTH),
    }


def layer(h, one):
    return h + jax.nn.relu(h @ one["w"] + one["b"])


def over_layers(h, layers, body=layer, **options):
    return lax.scan(lambda h, one: (body(h, one), None), h, layers, **options)[0]


def end(h):
    """Linear in h with whole numbers, so that no gradient is rounded."""
    return jnp.sum(h * (1 + jnp.arange(h.shape[-1], dtype=h.dtype)))


def simple_loss(p, x):
    return end(over_layers(x, p))


BORN = {"layers/b": "loop 0", "layers/w": "loop 0"}


@case(
    forward={},
    reverse={"reverse": True},
    unroll_2={"unroll": 2},
    unroll_3={"unroll": 3},
    unroll_all={"unroll": LAYERS},
)
def layers_in_a_scan(**options):
    def loss(p, x):
        return end(over_layers(x, p["layers"], **options) @ p["head"])

    return (
        loss,
        {"layers": weights(), "head": integers(9, WIDTH, 2)},
        BORN | {"head": "dot_general"},
    )


@case(
    body={"what": "body"}, all_of_it={"what": "all"}, dots={"what": "dots"}, scan={"what": "scan"}
)
def remat(what):
    policy = jax.checkpoint_policies.dots_saveable if what == "dots" else None
    body = jax.checkpoint(layer, policy=policy) if what in ("body", "dots") else layer

    def run_layers(h, layers):
        return over_layers(h, layers, body)

    if what == "scan":
        run_layers = jax.checkpoint(run_layers)

    def loss(p, x):
        return end(run_layers(x @ p["first"], p["layers"]))

    return (
        jax.checkpoint(loss) if what == "all" else loss,
        {"layers": weights(), "first": integers(9, WIDTH, WIDTH)},
        BORN | {"first": "dot_general"},
    )


@case(loss={"outer": True}, scan={"outer": False}, both={"outer": True, "inner": True})
def jit_around(outer, inner=True):
    scanned = jax.jit(over_layers) if inner else over_layers

    def loss(p, x):
        return end(scanned(x, p["layers"]))

    return jax.jit(loss) if outer else loss, {"layers": weights()}, BORN


@case()
def jit_that_casts_in_front_of_the_scan():
    @jax.jit
    def cast(layers):
        return jax.tree.map(lambda x: 2 * x.astype(jnp.bfloat16), layers)

    def loss(p, x):
        return end(over_layers(x.astype(jnp.bfloat16), cast(p["layers"]))).astype(jnp.float32)

    return loss, {"layers": weights()}, BORN


@case()
def custom_vjp_around_the_scan():
    @jax.custom_vjp
    def scanned(h, layers):
        return over_layers(h, layers)

    def forward(h, layers):
        return jax.vjp(over_layers, h, layers)

    scanned.defvjp(forward, lambda pullback, cotangent: pullback(cotangent))

    def loss(p, x):
        return end(scanned(x, p["layers"]))

    return loss, {"layers": weights()}, BORN


@case()
def layers_stacked_along_another_axis():
    def loss(p, x):
        layers = {"w": jnp.moveaxis(p["w"], 1, 0), "b": p["b"].T}
        return end(over_layers(x, layers))

    params = {"b": integers(0, WIDTH, LAYERS), "w": integers(1, WIDTH, LAYERS, WIDTH)}
    return loss, params, {"b": "loop 0", "w": "loop 0"}


@case(before={"first": True}, after={"first": False})
def weight_decay_in_the_loss(first):
    def loss(p, x):
        def decay():
            return sum(jnp.sum(w * w) for w in jax.tree.leaves(p["layers"]))

        if first:
            total = decay()
            return total + end(over_layers(x, p["layers"]))
        return end(over_layers(x, p["layers"])) + decay()

    return loss, {"layers": weights()}, BORN


@case()
def scaled_masked_and_summed_on_the_way():
    def loss(p, x):
        mask = (jnp.arange(LAYERS * WIDTH) % 2).reshape(LAYERS, WIDTH).astype(jnp.float32)
        layers = {
            "w": -p["w"].reshape(LAYERS, WIDTH, WIDTH) * 3,
            "b": jnp.where(mask > 0, p["b"], 0) * mask,
            "per_row": jnp.broadcast_to(p["row"][:, None, :], (LAYERS, 2, WIDTH)),
        }

        def body(h, one):
            return layer(h, one) + h @ one["per_row"].T @ one["per_row"]

        return end(over_layers(x, layers, body))

    params = {
        "w": integers(1, LAYERS * WIDTH, WIDTH),
        "b": integers(2, LAYERS, WIDTH),
        "row": integers(3, LAYERS, WIDTH),
    }
    return loss, params, {"w": "loop 0", "b": "loop 0", "row": "loop 0"}


@case()
def one_parameter_for_all_iterations():
    def loss(p, x):
        return end(over_layers(x, p["layers"], lambda h, one: layer(h, one) + h @ p["shared"]))

    params = {"layers": weights(), "shared": integers(9, WIDTH, WIDTH)}
    return loss, params, BORN | {"shared": "accumulated in the loop's carry"}


@case()
def one_layer_repeated():
    def loss(p, x):
        repeated = jax.tree.map(lambda w: jnp.broadcast_to(w, (LAYERS, *w.shape)), p)
        return end(over_layers(x, repeated))

    params = jax.tree.map(lambda w: w[0], weights())
    return loss, params, {"b": "reduce_sum", "w": "reduce_sum"}


@case()
def used_by_the_scan_and_outside_of_it():
    def loss(p, x):
        h = over_layers(x, p["layers"])
        return end(h @ p["layers"]["w"][1]) + jnp.sum(p["layers"]["b"] * 3)

    return loss, {"layers": weights()}, BORN


@case()
def two_scans_share_their_layers():
    def loss(p, x):
        h = over_layers(x, p["layers"])
        return end(over_layers(h, p["layers"], reverse=True))

    return loss, {"layers": weights()}, BORN


@case()
def one_scan_reads_its_layers_twice():
    def loss(p, x):
        def body(h, pair):
            return layer(layer(h, pair[0]), pair[1])

        return end(over_layers(x, (p["layers"], p["layers"]), body))

    return loss, {"layers": weights()}, BORN


@case()
def two_loops():
    def loss(p, x):
        h = over_layers(x, p["encoder"])
        return end(over_layers(h @ p["between"], p["decoder"]))

    params = {"encoder": weights(0, 3), "decoder": weights(5), "between": integers(9, WIDTH, WIDTH)}
    born = {"decoder/b": "loop 0", "decoder/w": "loop 0", "between": "dot_general"}
    return loss, params, born | {"encoder/b": "loop 1", "encoder/w": "loop 1"}


@case(stacked_twice={"flat": False}, stacked_once={"flat": True})
def nested_scans(flat):
    def loss(p, x):
        groups = p["layers"]
        if flat:
            groups = jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), groups)
        return end(over_layers(x, groups, over_layers))

    layers = weights()
    if not flat:
        layers = jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), layers)
    return loss, {"layers": layers}, BORN


@case()
def layers_per_microbatch():
    """The outer loop accumulates over microbatches, so nothing of it may be reduced inside."""

    def loss(p, x):
        def microbatch(total, part):
            return total + end(over_layers(part, p["layers"])), None

        return lax.scan(microbatch, 0 * jnp.sum(x), x.reshape(2, -1, WIDTH))[0]

    accumulated = "accumulated in the loop's carry"
    return loss, {"layers": weights()}, {"layers/b": accumulated, "layers/w": accumulated}


@case(done_before={"before": True}, done_after={"before": False})
def last_microbatch_added_to_the_others(before):
    """Gradients flow backwards: what the loss does first, the gradient does last."""

    def loss(p, x):
        first, last = jnp.split(x, 2)

        def microbatch(total, part):
            return total + end(over_layers(part, p["layers"])), None

        def others():
            return lax.scan(microbatch, 0 * jnp.sum(x), first.reshape(2, -1, WIDTH))[0]

        if before:
            return end(over_layers(last, p["layers"])) + others()
        total = others()
        return total + end(over_layers(last, p["layers"]))

    too_late = "'scan' comes after the loop and is needed in it"
    where = BORN if before else dict.fromkeys(BORN, too_late)
    return loss, {"layers": weights()}, where


@case()
def inside_a_cond():
    def loss(p, x):
        return lax.cond(
            jnp.sum(x) > 0,
            lambda: end(over_layers(x, p["layers"])),
            lambda: jnp.sum(p["layers"]["b"]),
        )

    return loss, {"layers": weights()}, {"layers/b": "'cond'", "layers/w": "'cond'"}


@case()
def a_single_iteration():
    def loss(p, x):
        return end(over_layers(x, p["layers"]))

    return (
        loss,
        {"layers": weights(layers=1)},
        {
            "layers/b": "single iteration",
            "layers/w": "single iteration",
        },
    )


@case()
def leaves_of_all_kinds():
    """Unused, empty and scalar slices, and inputs that are integers or keys."""

    def loss(p, x):
        inputs = (p, jnp.arange(LAYERS), jax.random.split(jax.random.key(0), LAYERS))

        def body(h, given):
            one, index, key = given
            kept = jax.random.bernoulli(key, 0.5, h.shape)
            return jnp.where(kept, layer(h, one) * one["scalar"], h) + index + one["empty"].sum()

        return end(over_layers(x, inputs, body))

    params = weights() | {
        "unused": integers(5, LAYERS, 3),
        "empty": jnp.zeros((LAYERS, 0)),
        "scalar": integers(6, LAYERS, low=1),
    }
    where = dict.fromkeys(params, "loop 0")
    return loss, params, where | {"unused": "not by a loop"}


@case()
def a_vector_is_the_whole_model():
    def loss(p, x):
        return end(over_layers(x, p, lambda h, one: h * one))

    return loss, integers(1, LAYERS, low=1, high=3), {"": "loop 0"}
