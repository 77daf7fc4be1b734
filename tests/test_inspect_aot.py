"""Targets to compile for, as far as that needs no compiler; the rest is in tests/aot."""

import importlib.resources
import importlib.util
import re
from pathlib import Path

import jax
import pytest

import fdp.aot


def test_the_target_is_part_of_the_package():
    config = importlib.resources.files("fdp") / "targets" / "h100.txtpb"
    assert 'device_description_str: "NVIDIA H100 80GB HBM3"' in config.read_text("utf-8")


@pytest.mark.parametrize(
    ("target", "wheels"),
    [
        ("v5e:2x4", "'jax[tpu]=={v}'"),
        ("h100:8", "'jax-cuda13-plugin=={v}' 'jax-cuda13-pjrt=={v}'"),
    ],
)
def test_a_missing_compiler_is_named(monkeypatch, target, wheels):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    command = re.escape("pip install " + wheels.format(v=jax.__version__))
    with pytest.raises(
        ImportError, match=f"compile for '{target}', but it is not installed: {command}"
    ):
        fdp.aot.mesh(target)


@pytest.mark.parametrize("target", ["", "h100", "v5e", "v5e:", "v5e:2by4", "h100:x"])
def test_a_target_of_another_form(target):
    with pytest.raises(ValueError, match=r"expected a target such as 'h100:8' .*'v5e:2x4'"):
        fdp.aot.topology(target)


@pytest.mark.parametrize("target", ["h100:0", "h100:12", "h100:2x4"])
def test_a_number_of_gpus_that_fills_no_hosts(target):
    with pytest.raises(ValueError, match=f"up to 8 or a multiple of it.*got '{target}'"):
        fdp.aot.topology(target)


def test_the_recorder_sets_the_same_environment():
    source = (Path(__file__).parent / "data" / "record_hlo.py").read_text("utf-8")
    for name, value in fdp.aot.ENVIRONMENT.items():
        assert f'{name}="{value}"' in source
