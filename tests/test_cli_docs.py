"""docs/cli.md: its model, its commands and the output it shows."""

import re
import shlex
from pathlib import Path

import cli_models
import pytest
from click.testing import CliRunner

from fdp.cli.app import program

TEXT = (Path(__file__).parent.parent / "docs" / "cli.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]


@pytest.fixture
def run(tmp_path, monkeypatch):
    cli_models.enter(tmp_path, monkeypatch)
    (source,) = (block for kind, block in BLOCKS if kind == "python")
    (tmp_path / "model.py").write_text(source)

    def run_line(line):
        name, *arguments = shlex.split(line)
        assert name == "fdp"
        got = CliRunner().invoke(program, arguments, prog_name="fdp")
        assert got.exit_code == 0, got.output
        return got.stdout

    return run_line


def test_the_plan_is_the_one_that_is_shown(run):
    (shown,) = (block for kind, block in BLOCKS if not kind)
    assert run(COMMANDS[0]) == shown


def test_shapes(run):
    (line,) = (line for line in COMMANDS if "--shapes" in line)
    assert "bfloat16  " in run(line)


def test_four_answers(run):
    (line,) = (line for line in COMMANDS if line.startswith("fdp inspect"))
    assert "--target h100:8" in line
    # tests/aot compiles for that target; here for one that needs no compiler.
    said = run(line.replace("--target h100:8", "--target cpu:8 --hardware h100"))
    questions = [row for row in said.splitlines() if "?" in row]
    assert len(questions) == 4
    assert "What would 64 devices do? (an estimate)" in questions


@pytest.mark.parametrize("name", ["plan", "inspect", "launch", "doctor", "bench"])
def test_every_command_is_in_the_table_and_shown(name):
    assert name in program.commands
    assert len(program.commands) == 5
    assert f"| `fdp {name}` |" in TEXT
    assert any(line.startswith(f"fdp {name}") for line in COMMANDS)
