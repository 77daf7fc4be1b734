"""The pages in docs/: their code runs and prints what they show, what they point to exists.

Names and figures: tests/test_docs_names.py. docs/cli.md, docs/frameworks.md and docs/cases.md have tests of their own.
`make docs` builds the site.
"""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import cli_models
import doc_blocks
import jax
import pytest
import yaml
from click.testing import CliRunner
from doc_blocks import PAGES, ROOT, read_blocks

import fdp
from fdp import launch
from fdp.cli.app import program

DOCS = ROOT / "docs"
LINKED = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
# Whose blocks are run by tests/test_cli_docs.py and tests/test_frameworks_docs.py.
ELSEWHERE = ("cli.md", "frameworks.md")
TEXTS = {page: page.read_text("utf-8") for page in PAGES}
RUN = [
    page
    for page in PAGES
    if page.name not in ELSEWHERE
    and any(block.language == "python" and not block.file for block in read_blocks(TEXTS[page]))
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path, *languages: str) -> list[doc_blocks.Block]:
    return [block for block in read_blocks(TEXTS[page]) if block.language in languages]


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_code_runs_and_prints_what_the_page_shows(page, tmp_path):
    for block, got, shown in doc_blocks.run_page(page, tmp_path):
        where = f"{name_of(page)}:{block.line}"
        assert got == (shown or ""), f"{where} prints\n{got}"


def test_pages_with_code_are_run():
    names = {page.name for page in RUN}
    assert {"concepts.md", "four_questions.md", "howto_pmap.md", "howto_shard_map.md"} <= names
    for page in PAGES:
        known = {"python", "text", "sh", "bash", "yaml", "", "{toctree}", "{eval-rst}"}
        used = {block.language for block in read_blocks(TEXTS[page])}
        assert {one for one in used if not one.startswith("{include}")} <= known, page


def numbers_and_words(text: str) -> tuple[list[float], str]:
    number = r"\d+(?:\.\d+)?"
    return [float(found) for found in re.findall(number, text)], re.sub(number, "#", text)


def test_four_answers_by_command(tmp_path, monkeypatch):
    page = DOCS / "four_questions.md"
    cli_models.enter(tmp_path, monkeypatch)
    doc_blocks.write_files(read_blocks(TEXTS[page]), tmp_path)
    shown = next(block for block in blocks_of(page, "text"))
    (line,) = (
        line for block in blocks_of(page, "sh") for line in block.code.splitlines() if "cpu" in line
    )
    got = CliRunner().invoke(program, line.split()[1:], prog_name="fdp")
    assert got.exit_code == 0, got.output
    said = got.stdout[: got.stdout.index("\n\n") + 1]
    # The counts are exact; the estimate moves a little with the compiler's fusions from one jax to the next.
    exact = slice(None, -2)
    assert said.splitlines()[exact] == shown.code.splitlines()[exact]
    (numbers, words), (wanted, same) = map(numbers_and_words, (said, shown.code))
    assert words == same
    assert numbers == pytest.approx(wanted, rel=0.15)


def test_the_program_for_many_hosts(tmp_path):
    doc_blocks.write_files(read_blocks(TEXTS[DOCS / "howto_many_hosts.md"]), tmp_path)
    (line,) = (
        line
        for block in blocks_of(DOCS / "howto_many_hosts.md", "sh")
        for line in block.code.splitlines()
        if line.startswith("fdp launch")
    )
    got = subprocess.run(
        [sys.executable, "-m", *line.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert got.returncode == 0, got.stderr
    assert "[0] 2 processes, 4 devices, step 10" in got.stdout.splitlines()  # Gloo talks too


def test_the_manifest_fits_together():
    (block,) = blocks_of(DOCS / "howto_many_hosts.md", "yaml")
    kinds = {one["kind"]: one for one in yaml.safe_load_all(block.code)}
    job, pod = kinds["Job"], kinds["Job"]["spec"]["template"]["spec"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert pod["subdomain"] == kinds["Service"]["metadata"]["name"]
    assert kinds["Service"]["spec"]["clusterIP"] == "None"
    assert kinds["Service"]["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    account = kinds["ServiceAccount"]["metadata"]["name"]
    assert pod["serviceAccountName"] == account == kinds["RoleBinding"]["subjects"][0]["name"]
    assert kinds["RoleBinding"]["roleRef"]["name"] == kinds["Role"]["metadata"]["name"]
    may = {
        (what, verb)
        for r in kinds["Role"]["rules"]
        for what in r["resources"]
        for verb in r["verbs"]
    }
    assert {("pods", "list"), ("jobs", "get"), ("services", "list")} <= may


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_shell_blocks_parse_and_their_commands_exist(page):
    for block in blocks_of(page, "bash", "sh"):
        checked = subprocess.run(["bash", "-n"], input=block.code, text=True, capture_output=True)
        assert checked.returncode == 0, f"{name_of(page)}:{block.line}: {checked.stderr}"
    shell = "\n".join(block.code for block in blocks_of(page, "bash", "sh"))
    inline = "\n".join(re.findall(r"`((?:fdp|make) [^`\n]+)`", TEXTS[page]))
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for command, name, rest in re.findall(
        r"^(fdp|make) ([a-z][\w-]*)(.*)$", f"{shell}\n{inline}", re.M
    ):
        if command == "make":
            assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"make {name}"
            continue
        assert name in program.commands, f"fdp {name}"
        known = {text for option in program.commands[name].params for text in option.opts}
        if name not in ("launch", "bench"):  # these pass options on
            assert set(re.findall(r"--[a-z-]+", rest)) <= known | {"--help"}, f"fdp {name}{rest}"


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links_lead_to_files_and_headings(page):
    assert doc_blocks.broken_links(page, page.read_text("utf-8")) == []


def test_what_is_included_is_there():
    readme = (ROOT / "README.md").read_text("utf-8")
    included = [
        mark
        for page in PAGES
        for block in read_blocks(TEXTS[page])
        if block.language == "{include} ../README.md"
        for mark in re.findall(r'^:(?:start-after|end-before): "(.*)"$', block.code, re.MULTILINE)
    ]
    assert len(included) == 4
    assert [mark for mark in included if readme.count(f"{mark}\n") != 1] == []


def test_a_broken_link_is_found():
    text = "# A b, `c`\n[x](#a-b-c) [y](#d) [z](nowhere.md) ![p](drawings/loops.svg) `[q](r)`"
    assert doc_blocks.anchors(text) == {"a-b-c"}
    page = DOCS / "index.md"
    assert doc_blocks.links(text) == ["#a-b-c", "#d", "nowhere.md", "drawings/loops.svg"]
    assert doc_blocks.broken_links(page, "[x](concepts.md#no) [y](cli.md)") == ["concepts.md#no"]


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_names_and_files_exist(page):
    text = page.read_text("utf-8")
    assert doc_blocks.unknown_names(text) == []
    for path in re.findall(
        r"`((?:benchmarks|examples|tests|fdp|docs)/[\w./]+\.\w+)(?:::\w+)?`", text
    ):
        assert (ROOT / path).exists(), path


def test_an_unknown_name_is_found():
    assert doc_blocks.unknown_names("fdp.nothing, fdp.hooks.nobody, fdp.launch.main, fdp.plan") == [
        "fdp.hooks.nobody",
        "fdp.nothing",
    ]


def test_the_drawings_are_what_the_script_draws(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "drawings")
    draw = importlib.import_module("draw")
    files = {path.stem: path.read_text("utf-8") for path in (DOCS / "drawings").glob("*.svg")}
    assert files == {name: make().svg() for name, make in draw.DRAWINGS.items()}
    # The plan that is drawn is the one that fdp makes.
    shapes = {
        name: jax.ShapeDtypeStruct((mib * 2**18,), "float32") for name, mib in draw.LEAVES.items()
    }
    plan = fdp.plan_buckets(shapes, bucket_bytes=16 * 2**20, first_bucket_bytes=4 * 2**20)
    assert [list(bucket.paths) for bucket in plan.buckets] == draw.BUCKETS


def test_the_launchers_usage_names_what_was_called(capsys):
    said = CliRunner().invoke(program, ["launch", "--help"], prog_name="fdp").stdout
    assert said.startswith("usage: fdp launch [-h] -n N"), said
    with pytest.raises(SystemExit):
        launch.main(["--help"])
    assert capsys.readouterr().out.startswith("usage: python -m fdp.launch [-h] -n N")
