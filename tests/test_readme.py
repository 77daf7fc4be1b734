"""Runs the README: every Python block in order, every file it shows. What it points to: tests/test_docs.py."""

import ast
import os
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from doc_blocks import ROOT, read_blocks, run_block

README = ROOT / "README.md"


TEXT = README.read_text("utf-8")
BLOCKS = read_blocks(TEXT)


@pytest.fixture(scope="module")
def namespace():
    """What all Python blocks leave behind, run from top to bottom as a reader would."""
    names: dict = {"__name__": "readme"}
    for block in BLOCKS:
        if block.language == "python" and block.file is None:
            run_block(block, names, README)
    return names


def test_every_block_is_of_a_kind_that_is_run():
    assert {block.language for block in BLOCKS} == {"python", "sh"}
    assert [block.file for block in BLOCKS if block.file] == ["train.py"]
    assert sum(block.language == "python" for block in BLOCKS) >= 6


def test_the_first_training_learns(namespace):
    first = next(block for block in BLOCKS if block.language == "python")
    names: dict = {}
    run_block(first, names, README)
    assert int(names["state"].step) == 100
    untrained = np.mean(names["make_batch"](np.random.default_rng(1), 4096)["y"] ** 2)
    assert float(names["info"].loss) < 0.1 * untrained


def test_a_train_step_takes_about_20_lines():
    first = next(block for block in BLOCKS if block.language == "python")
    assert len([line for line in first.code.splitlines() if line.strip()]) <= 20


def test_pmap_and_shard_map_give_the_gradients_of_one_device(namespace):
    expected = jax.grad(namespace["loss_fn"])(namespace["params"], namespace["batch"])
    for name in ("grads", "also_grads"):
        run_again: dict = dict(namespace)
        for block in BLOCKS:
            if f"{name} = " in block.code and "reduce_gradients" in block.code:
                run_block(block, run_again, README)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            run_again[name],
            jax.grad(namespace["loss_fn"])(run_again["params"], run_again["batch"]),
        )
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(expected))


def test_accumulated_gradients_are_those_of_the_whole(namespace):
    batch = namespace["make_batch"](np.random.default_rng(2), 256)
    got = namespace["value_and_grad"](namespace["params"], batch)
    expected = jax.value_and_grad(namespace["loss_fn"])(namespace["params"], batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)
    # Three steps were run after init, one of them without sync.
    assert int(namespace["state"].step) == 2
    assert namespace["state"].unreduced is None


def test_the_program_for_several_hosts(tmp_path):
    (block,) = [block for block in BLOCKS if block.file]
    (tmp_path / "train.py").write_text(block.code, "utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "2"}
    hosts = [
        subprocess.Popen(
            [sys.executable, "train.py", address, "2", str(process)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        printed = [host.communicate(timeout=300) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    losses = []
    for process, (out, err) in enumerate(printed):
        said = re.search(rf"^process {process}: loss (\d+\.\d+)$", out, re.MULTILINE)
        assert said, f"process {process} printed {out!r}\n{err}"
        losses.append(said.group(1))
    assert losses[0] == losses[1]


def test_commands_are_targets_of_the_makefile():
    shell = [block.code for block in BLOCKS if block.language == "sh"]
    commands = re.findall(r"^(\S+) (\S+)", "".join(shell), re.MULTILINE)
    assert commands == [("make", "demo"), ("make", "test")]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for _, target in commands:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_guarantee_names_a_test_that_exists():
    section = TEXT.partition("## What it guarantees")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 10
    for row in rows:
        names = re.findall(r"`(test_\w+\.py)::(\w+)`", row)
        assert names, f"no test in {row!r}"
        for file, function in names:
            tree = ast.parse((ROOT / "tests" / file).read_text("utf-8"))
            defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
            assert function in defined, f"{file} has no {function}"


def test_it_stays_short():
    assert len(TEXT.splitlines()) < 200


def test_an_unclosed_block_is_found():
    with pytest.raises(AssertionError, match="line 2 is not closed"):
        read_blocks("text\n```python\nx = 1\n")
