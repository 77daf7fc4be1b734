"""More errors about what a step is told to do. Run by ``test_messages``."""

import jax.numpy as jnp
from message_cases_plan import Case

from fdp import outcome
from fdp.checks import check_can_carry, check_carry_over, check_state
from fdp.state import Carried, TrainState, Unreduced

CARRIED = TrainState(
    0, {}, (), None, None, (), None, None, Carried(0.0, None, ({"w": jnp.ones((8, 3))},))
)
HELD = Unreduced(jnp.int32(1), jnp.ones(3), None)

NONE = {"weighted": False, "unused": "zero", "mean_over": "all"}

CASES = {
    "carry_over is no number": Case(
        lambda: check_carry_over(True, **NONE),
        TypeError,
        ("expected carry_over to be a whole number of buckets, got True", "carry_over=3"),
    ),
    "carry_over is negative": Case(
        lambda: check_carry_over(-1, **NONE),
        ValueError,
        ("expected carry_over to be at least 0, got -1",),
    ),
    **{
        f"carry_over with {name}": Case(
            lambda given={name: value}: check_carry_over(2, **{**NONE, **given}),
            ValueError,
            ("got carry_over=2", name, "is the next step's", "leave one of them out"),
        )
        for name, value in (("weighted", True), ("unused", "skip"), ("mean_over", "users"))
    },
    "carry_over with a hook's state": Case(
        lambda: check_can_carry(2, "error_feedback", jnp.ones(3)),
        ValueError,
        ("hook without state with carry_over=2", "got 'error_feedback'", "leave carry_over out"),
    ),
    "carried of another number of replicas": Case(
        lambda: check_state(CARRIED, 4),
        ValueError,
        (
            "state.carried",
            "4 replicas",
            "got shape [8, 3] at '0/w'",
            "trainer.finish(state) before you save",
        ),
    ),
    "held back without weights": Case(
        lambda: outcome.of_held_back(HELD, weighted=True, asks_for_use=False),
        ValueError,
        ("held back to be of a trainer with weighted=True", "got it from one without", "the same"),
    ),
    "held back with uses that nobody asks for": Case(
        lambda: outcome.of_held_back(
            HELD._replace(use=jnp.ones(1)), weighted=False, asks_for_use=False
        ),
        ValueError,
        ('without unused="skip" or mean_over="users"', "got it from one with:", "the same trainer"),
    ),
}
