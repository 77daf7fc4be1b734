"""The wheel: what is in it, and that it works where nothing else of the repository is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from doc_blocks import ROOT, read_blocks

import fdp

pytestmark = pytest.mark.slow


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    got = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert got.returncode == 0, f"{command}\n{got.stdout}\n{got.stderr}"
    return got


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    # Without isolation: hatchling comes with the test extra, and nothing is fetched.
    dist = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(dist), str(ROOT), cwd=dist)
    (built,) = dist.iterdir()
    return built


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_its_name_says_the_version(wheel):
    assert wheel.name == f"fdp-{fdp.__version__}-py3-none-any.whl"


def test_it_holds_the_package_and_nothing_else(wheel):
    """Every file of fdp/ that git tracks or would take, and the metadata."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "fdp"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    package = {name for name in listed.splitlines() if (ROOT / name).is_file()}
    assert {"fdp/py.typed", "fdp/targets/h100.txtpb", "fdp/cli/app.py"} <= package
    info = f"fdp-{fdp.__version__}.dist-info"
    metadata = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    assert set(names_in(wheel)) == package | metadata | {f"{info}/licenses/LICENSE"}


def test_its_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = f"fdp-{fdp.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode("utf-8")
        entry_points = archive.read(f"{info}/entry_points.txt").decode("utf-8")
    headers, _, description = metadata.partition("\n\n")
    assert "Requires-Python: >=3.11" in headers
    always = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", headers, re.MULTILINE)
    assert sorted(always) == ["flax", "jax", "jaxlib", "numpy", "optax"]
    assert description.startswith("# fdp")
    assert "fdp = fdp.cli:main" in entry_points


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    run("-m", "pip", "install", *options, "--target", str(folder), str(wheel), cwd=folder)
    return folder


# -P and an own folder: neither the current directory nor the repository is on the path. An editable install of
# the repository stands behind PYTHONPATH; each program proves that it was not what it got.
WHERE = "import fdp, pathlib; assert pathlib.Path(fdp.__file__).is_relative_to({folder!r}), fdp.__file__\n"


def test_the_quickstart_of_the_readme_runs(installed, tmp_path):
    code = next(
        block.code
        for block in read_blocks((ROOT / "README.md").read_text("utf-8"))
        if block.language == "python"
    )
    program = WHERE.format(folder=str(installed)) + code
    got = run("-P", "-c", program, cwd=tmp_path, PYTHONPATH=str(installed), JAX_NUM_CPU_DEVICES="4")
    (loss,) = re.findall(r"^loss (\d\.\d+) after 100 steps$", got.stdout, re.MULTILINE)
    assert float(loss) < 1
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_runs(installed, tmp_path):
    got = run("-P", "-m", "fdp", "--help", cwd=tmp_path, PYTHONPATH=str(installed))
    for command in ("plan", "inspect", "launch", "doctor", "bench"):
        assert re.search(rf"^\s+{command}\b", got.stdout, re.MULTILINE), got.stdout
    where = "import runpy, sys; sys.argv = ['fdp', '--version']; runpy.run_module('fdp', run_name='__main__')"
    program = WHERE.format(folder=str(installed)) + where
    got = run("-P", "-c", program, cwd=tmp_path, PYTHONPATH=str(installed))
    assert fdp.__version__ in got.stdout


def test_the_compilers_description_of_an_h100_comes_along(installed, tmp_path):
    program = WHERE.format(folder=str(installed)) + (
        "import importlib.resources as r; print(len((r.files('fdp') / 'targets' / 'h100.txtpb').read_text()))"
    )
    got = run("-P", "-c", program, cwd=tmp_path, PYTHONPATH=str(installed))
    assert int(got.stdout) == len((ROOT / "fdp" / "targets" / "h100.txtpb").read_text("utf-8"))
