"""More errors about what a step is told to do. Run by ``test_messages``."""

import jax.numpy as jnp
from message_cases_plan import Case

from fdp import outcome
from fdp.state import Unreduced

HELD = Unreduced(jnp.int32(1), jnp.ones(3), None)

CASES = {
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
