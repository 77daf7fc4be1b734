"""A plain pmap program moves to fdp by changing at most three lines, and trains the same."""

import difflib
import importlib
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "pmap"


def lines(name):
    """Without the docstring: it talks about the program."""
    return (FOLDER / name).read_text("utf-8").splitlines()[1:]


def test_at_most_three_lines_change():
    changes = [
        line
        for line in difflib.ndiff(lines("before.py"), lines("after.py"))
        if line[:2] in ("- ", "+ ") and line[2:].strip()
    ]
    added = [line for line in changes if line.startswith("+ ")]
    removed = [line for line in changes if line.startswith("- ")]
    assert len(added) <= 3
    assert len(removed) <= len(added)
    assert any("fdp.reduce_gradients" in line for line in added)
    assert 45 <= len([line for line in lines("before.py") if line.strip()]) <= 65


@pytest.mark.filterwarnings("ignore:.*pmap.*:DeprecationWarning")
def test_losses_are_equal(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    before, after = (
        importlib.import_module(f"pmap.{name}").main(1) for name in ("before", "after")
    )
    assert len(before) == 7
    # Both are float32; only where XLA fuses the division may the last bit differ.
    np.testing.assert_allclose(before, after, rtol=1e-6)
    assert before[-1] < before[0]
    assert "epoch 1" in capsys.readouterr().out
