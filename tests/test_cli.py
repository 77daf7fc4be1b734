"""The command `fdp`: plan, what it says of wrong input, and how it starts."""

import ast
import io
import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import cli_models
import click
import jax
import numpy as np
import optax
import pytest
from click.testing import CliRunner

import fdp
import fdp.cli
from fdp.cli import terminal
from fdp.cli.app import program

ROOT = Path(__file__).parent.parent


@pytest.fixture
def here(tmp_path, monkeypatch):
    return cli_models.enter(tmp_path, monkeypatch)


def fdp_(*arguments, env=None):
    return CliRunner().invoke(program, arguments, env=env)


def model():
    return __import__("a_model")


def test_the_plan_of_a_loss_follows_the_ready_order(here):
    caps = {"bucket_bytes": 2 * 4096, "first_bucket_bytes": 4096}
    got = fdp_("plan", "a_model:build", "--bucket-mb", 8192 / 2**20, "--first-bucket-mb", 2**-8)
    assert got.exit_code == 0, got.stderr
    loss, params, batch = model().build()
    order = fdp.gradient_ready_order(loss, params, batch)
    plan = fdp.plan_buckets(params, order=order, **caps)
    assert got.stdout.startswith(f"{plan}\n")
    # Tree order has layer_10 before layer_2, the backward pass begins with it.
    assert [b.paths[0] for b in plan.buckets] == ["layer_10/w", "layer_2/w", "layer_0/w"]
    assert "ready" in got.stdout.splitlines()[-1]


def test_the_plan_is_the_one_a_trainer_makes(here):
    """Also where a first cap of a layer makes "layer_0", which nothing can hide, wait for no other."""
    for first_mb, platform in ((2**-8, "cpu"), (1, "cpu"), (1, "tpu")):
        first = int(first_mb * 2**20)
        got = fdp_(
            *("plan", "a_model:build", "--platform", platform, "--json"),
            *("--first-bucket-mb", first_mb),
        )
        found = json.loads(got.stdout)
        loss, params, batch = model().build()
        assert found["bucket_bytes"] == fdp.suggested_bucket_bytes(platform)
        trainer = fdp.data_parallel(
            *(loss, optax.sgd(0.1)),
            bucket_bytes=found["bucket_bytes"],
            first_bucket_bytes=first,
        )
        assert trainer.plan(trainer.init(params), batch).fingerprint() == found["fingerprint"]
        assert len(found["buckets"]) == (3 if first_mb < 1 else 1)


def test_the_plan_of_params_alone_is_in_reverse_tree_order(here):
    got = fdp_("plan", "a_model:params", "--json")
    (bucket,) = json.loads(got.stdout)["buckets"]
    assert bucket["paths"] == ["layer_2/w", "layer_10/w", "layer_1/w", "layer_0/w"]
    assert json.loads(got.stdout)["order"] == "reverse"


def test_nothing_is_allocated(here):
    got = fdp_("plan", "a_model:enormous", "--json")  # 4 TB
    assert got.exit_code == 0, got.stderr
    assert json.loads(got.stdout)["nbytes"] == 4 * 10**12 + 4 * 10**6


def test_options_that_the_loss_needs(here):
    got = fdp_("plan", "a_model:full", "--json")
    assert got.exit_code == 0, got.stderr
    assert json.loads(got.stdout)["buckets"][0]["paths"][0] == "layer_10/w"


def test_shapes(here):
    got = fdp_(
        *("plan", "--shapes", "1024x1024,1024, 3x5", "--dtype", "bfloat16", "--first-bucket-mb"),
        *("0.001", "--json"),
    )
    found = json.loads(got.stdout)
    leaves = [jax.ShapeDtypeStruct(s, jax.numpy.bfloat16) for s in ((1024, 1024), (1024,), (3, 5))]
    plan = fdp.plan_buckets(leaves, first_bucket_bytes=1048)
    assert found["fingerprint"] == plan.fingerprint()
    assert [b["nbytes"] for b in found["buckets"]] == [b.nbytes for b in plan.buckets]
    assert found["buckets"][0]["dtype"] == "bfloat16"


def test_only_json_is_on_standard_output(here):
    got = fdp_("plan", "a_model:params", "--json")
    assert got.stdout.startswith("{")
    assert "imported" in got.stderr
    assert "called" in got.stderr


@pytest.mark.parametrize("name", ["closes_over", "needs_values"])
def test_allocate_calls_the_function_for_real(here, name):
    assert fdp_("plan", f"a_model:{name}").exit_code == 1
    got = fdp_("plan", f"a_model:{name}", "--allocate", "--json")
    assert got.exit_code == 0, got.stderr
    assert json.loads(got.stdout)["nbytes"] == 4 * 32 * 32 * 4


WRONG = {
    "plan": (2, "either MODULE:FUNCTION or --shapes"),
    "plan a_model:build --shapes 3": (2, "either MODULE:FUNCTION or --shapes"),
    "plan a_model": (2, "expected MODULE:FUNCTION, such as model:build, got 'a_model'"),
    "plan dir/a_model.py:build": (2, "write dir.a_model:build"),
    "plan no_such:build": (2, "there is no module 'no_such' here"),
    "plan a_model.sub:build": (2, "there is no module 'a_model.sub' here"),
    "plan a_model:nope": (2, "got 'nope': it has params, loss, build"),
    "plan a_model:number": (2, "a function without arguments that returns params, or (loss_fn"),
    "plan a_model:takes_one": (1, "missing 1 required positional argument: 'argument'"),
    "plan a_model:two": (2, "got 2 values of which the first is callable"),
    "plan a_model:options_list": (2, "a dict of data_parallel's options, got list"),
    "plan a_model:with_text": (1, "expected an array at 'name', got 'dense'"),
    "plan a_model:integers": (1, "at 'steps', got dtype int32"),
    "plan a_model:closes_over": (1, "pass --allocate"),
    "plan a_model:needs_values": (1, "pass --allocate"),
    "plan a_model:broken": (1, "[a_model.py:"),
    "plan imports_missing:build": (3, "imports 'no_such_package_of_anybody', which is not install"),
    "plan ends:build": (1, "if __name__ == '__main__'"),
    "plan wrong_syntax:build": (1, "SyntaxError"),
    "plan --shapes 3,x": (2, "got 'x'"),
    "plan --shapes 3 --dtype float33": (2, "got 'float33'"),
    "plan --shapes 3 --bucket-mb 0": (2, "a size in MiB, more than 0, got 0"),
    "plan --shapes 3 --bucket-mb inf": (2, "got inf"),
    "plan --shapes 3 --first-bucket-mb nan": (2, "got nan"),
    "plan --shapes 3 --bucket-mb many": (2, "See fdp plan --help."),
    "plan --shapes 3 --bogus": (2, "No such option '--bogus'"),
    "nothing": (2, "No such command 'nothing'. See fdp --help."),
    "--bogus": (2, "No such option '--bogus'"),
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_is_one_line_and_a_code(here, line):
    got = CliRunner().invoke(program, line.split(), prog_name="fdp")
    code, text = WRONG[line]
    # What the module prints when it is imported is the module's.
    said = [line for line in got.stderr.splitlines() if line not in ("imported", "called")]
    assert len(said) == 1, got.stderr
    assert said[0].startswith("fdp: ")
    assert text in said[0]
    assert got.exit_code == code
    assert got.stdout == ""


def test_traceback_shows_where(here):
    got = fdp_("--traceback", "plan", "a_model:broken")
    assert got.exit_code == 1
    assert 'a_model.py", line' in got.stderr
    assert got.stderr.splitlines()[-1].startswith("fdp: TypeError: ")


def test_an_interrupt_is_130(here):
    assert fdp_("plan", "a_model:interrupted").exit_code == 130


def test_no_arguments_show_the_help():
    got = fdp_()
    assert got.exit_code == 2
    assert all(name in got.stderr for name in ("plan", "inspect", "launch", "doctor", "bench"))
    assert fdp_("--help").exit_code == 0


def test_a_missing_library_is_named(monkeypatch, capsys):
    for name in [n for n in sys.modules if n.startswith("fdp.cli.") or n == "click"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "click", None)
    assert fdp.cli.main(["doctor"]) == 3
    said = capsys.readouterr().err
    assert (
        said
        == "fdp: the command line needs click, which is not installed: pip install 'fdp[cli]'\n"
    )


def test_the_core_does_not_import_the_libraries():
    for path in (ROOT / "fdp").rglob("*.py"):
        if "cli" in path.relative_to(ROOT / "fdp").parts or path.name == "__main__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.split(".")[0] in ("click", "rich")], path
            assert not [n for n in names if n.startswith("fdp.cli")], path


def test_the_package_says_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"] == {"fdp": "fdp.cli:main"}
    extra = project["optional-dependencies"]["cli"]
    assert tuple(line.partition(">=")[0] for line in extra) == fdp.cli._LIBRARIES


def test_as_a_program_from_another_directory(here):
    command = [sys.executable, "-m", "fdp", "plan", "a_model:build"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "no_such_platform"}
    got = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, check=False)
    assert got.returncode == 0, got.stderr
    assert got.stdout.startswith("bucket  leaves ")


def test_version():
    got = fdp_("--version")
    assert got.stdout.startswith(f"fdp {fdp.__version__}, jax {jax.__version__}, python 3.")


class Terminal:
    def isatty(self):
        return True


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert terminal.styled("x", Terminal(), fg="red") == click.style("x", fg="red") != "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.styled("x", Terminal(), fg="red") == "x"
    monkeypatch.delenv("NO_COLOR")
    assert terminal.styled("x", io.StringIO(), fg="red") == "x"


def test_progress_is_said_after_a_while_only(monkeypatch, capsys):
    with terminal.progress("waiting"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(terminal, "_PATIENCE", 0.01)
    with terminal.progress("waiting"):
        time.sleep(0.2)
    assert capsys.readouterr().err == "fdp: waiting ...\n"


def test_a_model_of_numpy_arrays_is_taken_at_jax_precision(here):
    (here / "a_model.py").write_text("import numpy\ndef build(): return [numpy.zeros((3, 2))]\n")
    got = fdp_("plan", "a_model:build", "--json")
    assert json.loads(got.stdout)["buckets"][0]["dtype"] == np.dtype("float32").name
