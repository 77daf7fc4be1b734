"""The notebooks as they are stored: each has its source, its outputs and an assert. `make notebooks` runs them."""

import base64
import importlib.util
import io
import json
import re
import sys
from pathlib import Path

import pytest
from test_repo_hygiene import MACHINE_PATH

FOLDER = Path(__file__).parent.parent / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
LARGEST = 300_000  # bytes; 05 holds all measured pictures

spec = importlib.util.spec_from_file_location("notebooks_run", FOLDER / "run.py")
run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)


def stored(source):
    return json.loads(source.with_suffix(".ipynb").read_text("utf-8"))


def text_of(lines):
    return lines if isinstance(lines, str) else "".join(lines)


def code_of(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def cells_of_source(source):
    """(type, text) of each cell of a percent script, read by hand: the tests need no jupytext."""
    _, header, body = source.read_text("utf-8").split("# ---\n", 2)
    assert "formats: ipynb,py:percent" in header
    parts = re.split(r"^# %%( \[markdown\])?\n", body, flags=re.MULTILINE)[1:]
    for marked, text in zip(parts[::2], parts[1::2], strict=True):
        lines = text.strip("\n").split("\n")
        if marked:
            yield "markdown", "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
        else:  # magics are comments in the source
            yield "code", "\n".join(re.sub(r"^# (?=%)", "", line) for line in lines)


def test_every_notebook_has_a_source_and_every_source_a_notebook():
    assert len(SOURCES) >= 4
    assert [path.stem for path in SOURCES] == sorted(p.stem for p in FOLDER.glob("*.ipynb"))
    assert [path.stem[:2] for path in SOURCES] == [f"{i:02d}" for i in range(1, len(SOURCES) + 1)]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
class TestStored:
    def test_cells_are_those_of_the_source(self, source):
        found = [(cell["cell_type"], text_of(cell["source"])) for cell in stored(source)["cells"]]
        assert found == list(cells_of_source(source)), "make notebooks"

    def test_it_was_run_from_the_start_and_shows_something(self, source):
        cells = code_of(stored(source))
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
        outputs = [output for cell in cells for output in cell["outputs"]]
        assert any("image/png" in output.get("data", {}) for output in outputs)
        assert any(output.get("name") == "stdout" for output in outputs)
        for output in outputs:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr"

    def test_it_ends_in_an_assert(self, source):
        assert re.search(r"^assert ", text_of(code_of(stored(source))[-1]["source"]), re.MULTILINE)

    def test_it_asks_for_eight_devices_in_its_first_cell(self, source):
        first = text_of(code_of(stored(source))[0]["source"])
        assert '"jax_num_cpu_devices", 8' in first

    def test_it_is_small_and_names_no_machine(self, source):
        raw = source.with_suffix(".ipynb").read_text("utf-8")
        assert len(raw) < LARGEST
        assert not MACHINE_PATH.search(raw)
        assert not re.search(r"/tmp/|site-packages| at 0x[0-9a-f]+", raw)

    def test_nothing_in_it_changes_by_itself(self, source):
        notebook = stored(source)
        assert notebook["metadata"] == run.METADATA
        ids = [cell["id"] for cell in notebook["cells"]]
        assert ids == [f"cell-{i}" for i in range(1, len(ids) + 1)]
        assert all(cell["metadata"] == {} for cell in notebook["cells"])

    def test_its_pictures_can_be_read(self, source):
        pictures = pytest.importorskip("PIL.Image", reason="comes with matplotlib")
        for cell in code_of(stored(source)):
            for output in cell["outputs"]:
                if png := output.get("data", {}).get("image/png"):
                    width, height = pictures.open(io.BytesIO(base64.b64decode(png))).size
                    assert 400 < width < 1300
                    assert 100 < height < 1300


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    assert run.main([]) == run.MISSING
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "expected ipykernel, to run notebooks: pip install 'fdp[notebooks]'"
    ]


def test_an_unknown_name_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(run, "missing_packages", lambda: "")
    assert run.main(["--check", "01", "99"]) == run.USAGE
    captured = capsys.readouterr()
    assert captured.err.startswith("expected names out of 01_quickstart, ")
    assert captured.err.endswith("got 99\n")
    assert captured.err.count("\n") == 1


SMALL = """# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Words

# %%
import sys
print("shown")
print("noise", file=sys.stderr)

# %%
assert {claim}
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Writes a notebook's source in a folder of its own; the runner looks there."""
    for package in ("jupytext", "nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(package, reason="the extra notebooks brings it")
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # restored after: the runner sets it
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))

    def write(claim):
        path = tmp_path / "01_small.py"
        path.write_text(SMALL.format(claim=claim), "utf-8")
        return path

    return write


def test_the_runner_stores_outputs_twice_the_same_and_checks_them(small, capsys):
    path = small("True")
    assert run.main([]) == 0
    assert "not kept, from standard error of cell 2: noise" in capsys.readouterr().err
    once = path.with_suffix(".ipynb").read_bytes()
    (first, second) = code_of(json.loads(once))
    assert [text_of(output["text"]) for output in first["outputs"]] == ["shown\n"]
    assert second["outputs"] == []
    assert run.main([]) == 0
    assert path.with_suffix(".ipynb").read_bytes() == once
    small("1 == 1")
    assert run.main(["--check"]) == run.FAILED
    assert "cell 3 of 01_small.ipynb is not the one in 01_small.py" in capsys.readouterr().out
    assert path.with_suffix(".ipynb").read_bytes() == once


def test_a_cell_that_fails_fails_the_run_and_stores_nothing(small, capsys):
    path = small("1 == 2")
    assert run.main([]) == run.FAILED
    out = capsys.readouterr().out
    assert "AssertionError" in out
    assert "\x1b" not in out
    assert not path.with_suffix(".ipynb").exists()
    assert run.main(["--check"]) == run.FAILED
    assert "01_small.ipynb is not there" in capsys.readouterr().out
