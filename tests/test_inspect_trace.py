"""What the profiler saw of a step, read back: by hand-made traces, and by one of a real step."""

import gzip
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from inspect_recorded import CPU, GPU, recorded, text
from jax.sharding import Mesh

import fdp
from fdp.inspect import Span, Trace, collectives, load, read_trace

MODULE = load(text(CPU, "chained")).module.name
WIRE = collectives(recorded(CPU, "chained"))[0].name


def event(name, ts, dur, device=0, run="7", module=MODULE):
    args = {"hlo_op": name, "hlo_module": module, "device_ordinal": str(device), "run_id": run}
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "args": args}


def write(path, events):
    noise = [
        {"ph": "M", "name": "process_name", "args": {"name": "/host:CPU"}},
        {"ph": "X", "name": "PjitFunction(step)", "ts": 1.0, "dur": 900.0},
        {"ph": "X", "name": f"end: {WIRE}", "ts": 2.0, "dur": 1.0, "args": {}},
        {},
    ]
    with gzip.open(path, "wt") as stream:
        json.dump({"traceEvents": [*noise, *events]}, stream)
    return path


def test_only_operations_of_the_program_are_kept(tmp_path):
    file = write(
        tmp_path / "vm.trace.json.gz",
        [
            event("other", 500.0, 5.0, module="jit_other"),
            event("some_fusion", 1000.0, 20.0),
            event(WIRE, 1010.0, 40.0),
            event("some_fusion", 1030.0, 5.0, device=1),
        ],
    )
    trace = read_trace(file, recorded(CPU, "chained"))
    assert [(s.device, s.kind, s.name) for s in trace.spans] == [
        (0, "compute", "some_fusion"),
        (0, "collective", WIRE),
        (1, "compute", "some_fusion"),
    ]
    assert [(s.start, s.end) for s in trace.spans] == [
        (0.0, pytest.approx(20e-6)),
        (pytest.approx(10e-6), pytest.approx(50e-6)),
        (pytest.approx(30e-6), pytest.approx(35e-6)),
    ]
    assert trace.seconds == pytest.approx(50e-6)
    assert trace.devices == (0, 1)
    assert trace.collective_seconds(0) == pytest.approx(40e-6)
    assert trace.beside(0) == pytest.approx(10 / 40)
    assert trace.beside(1) == 1.0


def test_overlapping_spans_count_once():
    spans = (
        Span(0, "collective", "a", 0.0, 4.0),
        Span(0, "collective", "b", 2.0, 6.0),  # open from 0 to 6
        Span(0, "matmul", "c", 1.0, 3.0),
        Span(0, "compute", "d", 2.0, 4.0),
        Span(0, "compute", "e", 5.0, 9.0),  # computing from 1 to 4 and from 5 to 9
        Span(1, "matmul", "f", 0.0, 9.0),  # another device's
    )
    trace = Trace(spans, 9.0)
    assert trace.collective_seconds(0) == 6.0
    assert trace.beside(0) == pytest.approx(4.0 / 6.0)
    assert "67%" in str(trace)


def test_a_run_is_chosen_in_the_order_of_time(tmp_path):
    file = write(
        tmp_path / "vm.trace.json.gz",
        [event("late", 90.0, 1.0, run="1"), event("early", 10.0, 2.0, run="2")],
    )
    program = recorded(CPU, "chained")
    assert [read_trace(file, program, run=run).spans[0].name for run in (0, 1, -1)] == [
        "early",
        "late",
        "late",
    ]
    with pytest.raises(
        ValueError, match=r"expected run from -2 to 1, for the 2 runs of .* got 2\."
    ):
        read_trace(file, program, run=2)


def test_the_newest_trace_of_a_folder_is_read(tmp_path):
    for number, name in enumerate(("b", "a")):
        folder = tmp_path / "plugins" / "profile" / name
        folder.mkdir(parents=True)
        file = write(folder / "vm.trace.json.gz", [event(f"op_{name}", 10.0, 2.0)])
        os.utime(file, (number, number))
    assert read_trace(tmp_path, recorded(CPU, "chained")).spans[0].name == "op_a"


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"expected a \*\.trace\.json\.gz file, or a folder"
    ):
        read_trace(tmp_path, recorded(CPU, "chained"))
    file = write(tmp_path / "vm.trace.json.gz", [event("x", 1.0, 1.0, module="jit_other")])
    with pytest.raises(ValueError, match=r"got those of jit_other\. Run the compiled step inside"):
        read_trace(file, recorded(CPU, "chained"))
    write(file, [])
    with pytest.raises(ValueError, match="got those of no program"):
        read_trace(file, recorded(CPU, "chained"))
    with pytest.raises(
        ValueError, match=r"expected a program compiled for CPU, .* got one for gpu"
    ):
        read_trace(file, recorded(GPU, "chained"))


def test_a_real_step(tmp_path):
    """Two devices, a loop and two buckets: every collective of the program is seen on each device, once a run."""

    def loss(params, batch):
        hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, params["layers"])
        return jnp.mean((hidden @ params["head"]) ** 2)

    params = {
        "layers": np.ones((3, 64, 64), np.float32) / 64,
        "head": np.ones((64, 64), np.float32),
    }
    trainer = fdp.data_parallel(
        loss,
        optax.sgd(0.1),
        mesh=Mesh(np.array(jax.devices("cpu")[:2]), ("data",)),
        bucket_bytes=64 * 64 * 4,
    )
    state, batch = trainer.init(params), np.ones((8, 64), np.float32)
    state, _ = jax.block_until_ready(trainer.train_step(state, batch))
    compiled = trainer.lower(state, batch).compile()
    with jax.profiler.trace(tmp_path):
        for _ in range(2):
            state, _ = trainer.train_step(state, batch)
            jax.block_until_ready(state)
    trace = read_trace(tmp_path, compiled)
    assert trace.devices == (0, 1)
    wanted = sorted(collective.name for collective in collectives(compiled))
    assert len(wanted) >= 2
    for device in trace.devices:
        own = [span for span in trace.spans if span.device == device]
        assert sorted(span.name for span in own if span.kind == "collective") == wanted
        # Forward and backward of each layer, and of the head; the loop's own event is not among them.
        assert sum(span.kind == "matmul" for span in own) >= 3 + 2 * 3
        assert not any(span.name.startswith("while") for span in own)
        assert 0 < trace.collective_seconds(device) <= trace.seconds
    first = read_trace(tmp_path, compiled, run=0)
    assert len(first.spans) == len(trace.spans)
    assert first.spans != trace.spans
