"""Every error of the core that a user can cause: its type, and that it says what was expected, what came, what to do.

``test_every_raise_has_a_case`` compares the cases with the ``raise`` statements in the sources.
"""

import ast
import traceback
from pathlib import Path

import message_cases_data
import message_cases_hooks
import message_cases_plan
import message_cases_reduce
import message_cases_small
import message_cases_step
import message_cases_step2
import pytest
from message_cases_plan import Case

import fdp

CORE = (
    "compat plan match pack hooks schedules dependency wire reduce accumulate scalars loss "
    "data/batches data/indices data/padding "
    "model_state finite outcome probe used"
).split()
CASES = {
    **message_cases_plan.CASES,
    **message_cases_hooks.CASES,
    **message_cases_reduce.CASES,
    **message_cases_data.CASES,
    **message_cases_step.CASES,
    **message_cases_step2.CASES,
    **message_cases_small.CASES,
}


def provoked(case: Case) -> Exception:
    with pytest.raises(case.kind) as caught:
        case.call()
    assert type(caught.value) is case.kind
    return caught.value


@pytest.mark.parametrize("name", CASES)
def test_message(name):
    text = str(provoked(CASES[name]))
    for fragment in CASES[name].says:
        assert fragment in text
    assert text.endswith((".", ".)"))


def raises_of(path: Path) -> list[range]:
    """Lines of every ``raise`` statement of a file that makes or passes on a user's error."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    return [
        range(n.lineno, (n.end_lineno or n.lineno) + 1)
        for n in nodes
        if isinstance(n, ast.Raise) and n.exc
    ]


def test_every_raise_has_a_case():
    folder = Path(fdp.__file__).parent
    files = {str(folder / f"{module}.py"): raises_of(folder / f"{module}.py") for module in CORE}
    seen = set()
    for case in CASES.values():
        frames = traceback.extract_tb(provoked(case).__traceback__)
        own = [frame for frame in frames if frame.filename in files]
        if own:  # others come from above the core
            seen.add((own[-1].filename, own[-1].lineno))
    missing = [
        f"{Path(name).name}:{lines.start}"
        for name, statements in files.items()
        for lines in statements
        if not any((name, line) in seen for line in lines)
    ]
    assert sum(map(len, files.values())) > 30
    assert missing == []
