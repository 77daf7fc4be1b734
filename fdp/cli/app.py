"""The commands of `fdp` and their options."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from fdp import launch as launcher
from fdp.cli import doctor, planning, targets
from fdp.cli.answers import in_words
from fdp.cli.benches import run_benchmark
from fdp.cli.estimating import ASSUMPTIONS, check_hardware, estimate
from fdp.cli.group import Program
from fdp.cli.inspecting import inspect_model, inspection_json
from fdp.cli.installed import versions
from fdp.cli.loading import Model, load_model
from fdp.cli.terminal import (
    FAILED,
    USAGE,
    Stop,
    heading,
    progress,
    styled,
)
from fdp.inspect import HARDWARE
from fdp.options import PLATFORMS, suggested_bucket_bytes
from fdp.plan import DEFAULT_FIRST_BUCKET_BYTES

_PASSED_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def _mb(value: float | None, name: str, default: int | None) -> int | None:
    """MiB as bytes."""
    if value is None:
        return default
    if not 1 <= value * 2**20 < 2**63:
        raise Stop(f"expected {name} to be a size in MiB, more than 0, got {value:g}.", USAGE)
    return int(value * 2**20)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1))


_bucket_mb = click.option(
    "--bucket-mb", type=float, help="Cap of a bucket in MiB (torch's bucket_cap_mb)."
)
_first_bucket_mb = click.option(
    "--first-bucket-mb", type=float, help="Cap of the bucket that is ready first, in MiB."
)
_allocate = click.option(
    "--allocate", is_flag=True, help="Call FUNCTION for real, where it cannot be traced for shapes."
)
_as_json = click.option("--json", "as_json", is_flag=True, help="For a program to read.")


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        found = versions()
        own = found["fdp"] or getattr(sys.modules["fdp"], "__version__", "")
        click.echo(f"fdp {own}, jax {found['jax']}, python {found['python']}")
        ctx.exit()


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--traceback", is_flag=True, help="Show Python's traceback of a failure.")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version)
def program(traceback: bool) -> None:
    """Data parallel training in JAX: buckets, what the compiler makes of them, and programs to run.

    Exit codes: 0 all is well, 1 it failed, 2 the command was not understood, 3 something is not
    installed. launch and bench end with the code of what they ran.
    """


@program.command()
@click.argument("model", metavar="[MODULE:FUNCTION]", required=False)
@click.option("--shapes", help="Instead of a model: its arrays, such as 1024x1024,1024.")
@click.option("--dtype", default="float32", show_default=True, help="Of --shapes.")
@_bucket_mb
@_first_bucket_mb
@click.option(
    "--platform",
    type=click.Choice(PLATFORMS),
    default="gpu",
    show_default=True,
    help="Whose cap of a bucket to take where --bucket-mb is not given.",
)
@_allocate
@_as_json
def plan(
    model: str | None,
    shapes: str | None,
    dtype: str,
    bucket_mb: float | None,
    first_bucket_mb: float | None,
    platform: str,
    allocate: bool,
    as_json: bool,
) -> None:
    """Which gradient goes into which bucket, in the order buckets are sent.

    FUNCTION takes no arguments and returns parameters, or (loss_fn, params, batch). It is traced, so nothing is
    allocated. With a loss the order is that in which gradients become ready; without one it is reverse tree order. The
    cap of the bucket that is ready first is 1 MiB unless given.
    """
    if (model is None) == (shapes is None):
        raise click.UsageError("Expected either MODULE:FUNCTION or --shapes")
    targets.use_cpu()
    caps = (
        _mb(bucket_mb, "--bucket-mb", suggested_bucket_bytes(platform)),
        _mb(first_bucket_mb, "--first-bucket-mb", DEFAULT_FIRST_BUCKET_BYTES),
    )
    assert caps[0] is not None
    assert caps[1] is not None
    with progress(f"reading {model or 'shapes'}"):
        if model is None:
            found = Model(planning.parse_shapes(shapes or "", dtype))
        else:
            found = load_model(model, allocate=allocate)
        made, order = planning.plan_model(found, caps[0], caps[1])
    if as_json:
        _print_json({**planning.plan_json(made), "order": order})
        return
    click.echo(str(made))
    ready = "gradients become ready in, read from the loss"
    click.echo(f"order: the one {ready}" if order == "ready" else "order: reverse tree order")


@program.command()
@click.argument("model", metavar="MODULE:FUNCTION")
@click.option(
    "--target",
    default="cpu",
    show_default=True,
    help="cpu:8, h100:8 (GPU and how many), v5e:2x4 (TPU and shape of the slice); cpu is cpu:8.",
)
@click.option(
    "--devices", type=click.IntRange(min=2), help="Also estimate a step on that many devices."
)
@click.option(
    "--hardware",
    type=click.Choice(list(HARDWARE)),
    help="Whose published figures the estimate takes; the target's if left out.",
)
@click.option("--per-device", is_flag=True, help="The batch is that of one device, not of all.")
@_bucket_mb
@_first_bucket_mb
@_allocate
@_as_json
def inspect(
    model: str,
    target: str,
    devices: int | None,
    hardware: str | None,
    per_device: bool,
    bucket_mb: float | None,
    first_bucket_mb: float | None,
    allocate: bool,
    as_json: bool,
) -> None:
    """Compiles a train step and says what it communicates, and what hides it.

    FUNCTION takes no arguments and returns (loss_fn, params, batch), and after these, if wanted, an optax optimizer
    (SGD otherwise) and a dict of fdp.data_parallel's options. Neither the model is allocated nor the hardware needed:
    GPU and TPU programs come from the real compilers.
    """
    caps = {
        "bucket_bytes": _mb(bucket_mb, "--bucket-mb", None),
        "first_bucket_bytes": _mb(first_bucket_mb, "--first-bucket-mb", None),
    }
    targets.prepare(target)
    check_hardware(target, targets.platform(target), devices, hardware)
    with progress(f"reading {model}"):
        loaded = load_model(model, allocate=allocate)
    given = {name: cap for name, cap in caps.items() if cap is not None}
    found = inspect_model(loaded, target, per_device=per_device, caps=given)
    guess = estimate(found.program, devices, hardware)
    if as_json:
        _print_json(inspection_json(found, guess, ASSUMPTIONS))
        return
    for question, answer in in_words(found.answers, guess):
        click.echo(f"{heading(question)}\n  {answer}")
    spent = (
        f"traced in {found.seconds['trace']:.1f} s, compiled in {found.seconds['compile']:.1f} s"
    )
    click.echo(f"\n{heading('The plan')}\n{found.explanation}")
    click.echo(f"\n{heading('The compiled program')} ({spent})\n{found.report}")


@program.command(name="launch", add_help_option=False, context_settings=_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="-n N SCRIPT [ARGS]...")
@click.pass_context
def launch_command(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Starts a script as several processes of one run (python -m fdp.launch)."""
    ctx.exit(launcher.main(list(arguments), prog=ctx.command_path))


_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "fails": "red"}


@program.command(name="doctor")
@_as_json
@click.pass_context
def doctor_command(ctx: click.Context, as_json: bool) -> None:
    """Devices, processes, threads, compiler options, versions, and what is missing.

    Ends with 1 if something will not work; notes and warnings do not count.
    """
    # A look must not take a GPU's memory from a run. Read when JAX starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with progress("asking JAX for devices"):
        found = doctor.examine()
    if as_json:
        _print_json(found)
    else:
        width = max(len(check["name"]) for check in found["checks"])
        for check in found["checks"]:
            status = styled(check["status"].ljust(7), sys.stdout, fg=_STYLES[check["status"]])
            click.echo(f"{status}  {check['name'].ljust(width)}  {check['text']}")
        failed = [check["name"] for check in found["checks"] if check["status"] == "fails"]
        end = f"Will not work: {', '.join(failed)}." if failed else "What fdp needs works."
        click.echo(heading(end))
    ctx.exit(0 if found["ok"] else FAILED)


@program.command(name="bench", context_settings=_PASSED_ON)
@click.argument("name")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def bench_command(ctx: click.Context, name: str, arguments: tuple[str, ...]) -> None:
    """Runs python -m benchmarks.NAME, in a clone of fdp's repository."""
    ctx.exit(run_benchmark(name, arguments))
