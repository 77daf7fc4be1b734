"""What must not be in the repository, and what must agree in it."""

import gzip
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import fdp

ROOT = Path(__file__).parent.parent

# Where packages come from is a setting of the machine.
REGISTRY = re.compile(r"\b(pypi|pythonhosted|registry\.npmjs|conda\.anaconda)\.org\b")
# Somebody's home or workplace: typically a traceback or a warning left in a notebook's output.
MACHINE_PATH = re.compile(r"(?<![\w.~>}/-])/(?:home|Users|root|work)/[\w.-]+|\b[A-Z]:\\Users\\")


def repository_files() -> list[Path]:
    """The files that git tracks, and the new ones it would take."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    # Listed and gone: deleted, not yet committed.
    return [path for path in paths if path.is_file()]


def matches(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in repository_files():
        raw = path.read_bytes()
        try:
            # Recorded programs are packed, and name the source files they come from.
            text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
        except UnicodeDecodeError:  # a picture
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if hit := pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {hit.group()}")
    return found


def test_no_registry_host():
    assert matches(REGISTRY) == []


def test_no_path_of_one_machine():
    assert matches(MACHINE_PATH) == []


@pytest.mark.parametrize("folder", ["home", "Users", "root", "work"])
def test_a_machine_path_is_found(folder):
    assert MACHINE_PATH.search(f'File "/{folder}/someone/fdp/plan.py", line 1')
    assert not MACHINE_PATH.search(f"see docs/{folder}/someone and https://host/{folder}/x")


def test_a_registry_is_found():
    assert REGISTRY.search("pip install -i https://files.pythonhosted" + ".org/simple fdp")
    assert not REGISTRY.search("a badge on pypi and its organisation")


def test_version_is_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert fdp.__version__ == project["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == project["version"]


def test_everything_exported_exists_and_has_a_docstring():
    assert fdp.__all__, "fdp exports nothing"
    for name in fdp.__all__:
        assert hasattr(fdp, name), name
        exported = getattr(fdp, name)
        if callable(exported):
            assert (exported.__doc__ or "").strip(), name
