"""What docs/ says by name and by number: DDP's arguments, fdp's public names, figures from committed results."""

import importlib
import inspect
import json
import re

import pytest
from doc_blocks import ROOT

import fdp
from fdp import birth

DOCS = ROOT / "docs"


def text_of(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


# torch.nn.parallel.DistributedDataParallel of PyTorch 2.13.0.
DDP_ARGUMENTS = """
    module device_ids output_device dim broadcast_buffers init_sync process_group bucket_cap_mb
    find_unused_parameters check_reduction gradient_as_bucket_view static_graph delay_all_reduce_named_params
    param_to_hook_all_reduce mixed_precision device_mesh skip_all_reduce_unused_params bucket_cap_mb_list
    batched_grad_copy forward_sync_buffers
""".split()
DDP_METHODS = """
    forward gather join join_device join_hook join_process_group no_sync register_comm_hook scatter to_kwargs train
    will_sync_module_buffers
""".split()


def rows_under(heading: str) -> list[str]:
    text = text_of("coming_from_ddp.md")
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \| \S", section, re.MULTILINE)


def test_every_argument_and_method_of_ddp_has_a_row():
    assert rows_under("Constructor arguments") == DDP_ARGUMENTS
    assert sorted(rows_under("Methods and attributes")) == sorted([*DDP_METHODS, "module"])


@pytest.mark.torch
def test_the_recorded_names_are_those_of_ddp():
    ddp = importlib.import_module("torch").nn.parallel.DistributedDataParallel
    assert list(inspect.signature(ddp).parameters) == DDP_ARGUMENTS
    assert sorted(name for name in vars(ddp) if not name.startswith("_")) == sorted(
        [*DDP_METHODS, "broadcast_buffers"]
    )
    for name in rows_under("Names with an underscore that people use"):
        assert hasattr(ddp, name), name


# With those of fdp itself, what is public.
MODULES = [
    importlib.import_module(f"fdp.{name}")
    for name in ("aot", "data", "hooks", "inspect", "launch", "pack", "schedules")
]


def described() -> list[str]:
    text = "\n".join(page.read_text("utf-8") for page in (DOCS / "api").glob("*.md"))
    return re.findall(r"^\.\. (?:auto(?!module)\w+|data):: (fdp[\w.]+)$", text, re.M)


def look_up(dotted: str):
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_every_public_name_is_in_the_reference():
    there = [look_up(dotted) for dotted in described()]
    public = {name: getattr(fdp, name) for name in fdp.__all__}
    for module in MODULES:
        own = {
            name: value
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
        }
        listed = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
        public |= {f"{module.__name__}.{name}": value for name, value in {**own, **listed}.items()}
    missing = [
        name
        for name, value in public.items()
        if not inspect.ismodule(value) and not any(value is one for one in there)
    ]
    assert missing == []


def test_the_reference_names_each_thing_once_and_documented():
    names = described()
    assert len(names) == len(set(names)) > 60
    for dotted in names:
        value = look_up(dotted)
        if callable(value):
            doc = (value.__doc__ or "").strip()
            assert doc, dotted
            assert not doc.startswith(f"{dotted.rpartition('.')[2]}("), dotted


def test_figures_come_from_the_code_and_from_committed_results():
    concepts, when_not = text_of("concepts.md"), text_of("when_not.md")
    assert f"at least {birth.MIN_SLICE_BYTES // 1024} KiB of gradients an iteration" in concepts
    results = ROOT / "benchmarks" / "results"
    rows = json.loads((results / "compiled.json").read_text("utf-8"))["programs"]
    share = {
        (row["model"], row["way"]): f"{row['bytes_beside_matmuls'] / row['bytes']:.0%}".replace(
            "%", " %"
        )
        for row in rows
        if row["target"] == "h100:8"
    }
    flag = {model: share[model, "pmean, limit"] for model in ("gpt", "gpt scanned", "resnet50")}
    ours = {model: share[model, "fdp"] for model in flag}
    said = re.sub(r"\s+", " ", when_not)
    assert f"beside {flag['gpt']} of the gradient bytes of 12 unrolled" in said
    assert f"where fdp has {ours['gpt']}." in said
    assert f"({flag['gpt scanned']}, fdp {ours['gpt scanned']})" in said
    assert f"ResNet-50 ({flag['resnet50']}, fdp {ours['resnet50']})" in said
    for model in ("mlp", "mlp-unequal"):
        ways = json.loads((results / f"t1_step_time_{model}.json").read_text("utf-8"))["ways"]
        seconds = {way: found["median_s"] for way, found in ways.items()}
        ordered = {way: s for way, s in seconds.items() if way.startswith("fdp:ordered")}

        def gained(carrying, ordered=ordered, seconds=seconds):
            best = min(s for way, s in ordered.items() if ("carry" in way) == carrying)
            others = (seconds[way] for way in ("jax:pmean", "fdp:serialized,cap=5"))
            return [f"{1 - best / other:.0%}".replace("%", " %") for other in others]

        plain, serialized = gained(carrying=False)
        assert f"{plain} over one `pmean`" in said
        assert f"{serialized} over the same buckets" in said
        if model == "mlp":
            assert " and ".join(gained(carrying=True)) + " with buckets carried over" in said
