"""fdp.launch, fdp.supervise and fdp.child: processes started, watched, stopped and connected."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from fdp import launch
from fdp.supervise import Command, supervise

ROOT = Path(__file__).parent.parent
PYTHON = [sys.executable, "-I", "-S", "-c"]
SLEEP = "import time; time.sleep(60)"


def run(*sources, **options):
    """Supervises one small Python program per rank, without echo."""
    options = {"echo": False, "capture": True, **options}
    return supervise([Command([*PYTHON, source], os.environ) for source in sources], **options)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def send_when(path, *signals):
    """Sends signals to this process, some time apart, once a rank has made the file `path`."""

    def send():
        while not path.exists():
            time.sleep(0.01)
        for number in signals:
            time.sleep(0.15)
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


def test_output_is_prefixed_by_rank(capsys):
    source = "import sys; print('a\\nb'); print('half', end=''); print('x\\ry', file=sys.stderr)"
    assert run(source, source, echo=True).code == 0
    captured = capsys.readouterr()
    for rank in (0, 1):
        mine = [line for line in captured.out.splitlines(True) if line.startswith(f"[{rank}]")]
        assert mine == [f"[{rank}] a\n", f"[{rank}] b\n", f"[{rank}] half\n"]
        assert f"[{rank}] x\r" in captured.err
        assert f"[{rank}] y\n" in captured.err


def test_all_end_well():
    assert run("print(0)", "print(1)") == (0, None, "", None, ("0\n", "1\n"), ("", ""))


def test_first_failure_stops_all_and_gives_its_code():
    start = time.monotonic()
    outcome = run(SLEEP, "raise SystemExit(3)", SLEEP)
    assert (outcome.code, outcome.rank) == (3, 1)
    assert outcome.reason == "process 1 failed with exit code 3, the others were stopped"
    assert time.monotonic() - start < 10


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the order of ends is seen on Linux only")
def test_of_two_failures_the_first_counts(tmp_path, monkeypatch):
    # Rank 0 fails because rank 1 has died: it waits for a lock that rank 1 holds. Both have ended when
    # the launcher, which cannot get rid of its output in time, looks again.
    lock, held = str(tmp_path / "lock"), str(tmp_path / "held")
    take = f"import fcntl, os, time; f = open({lock!r}, 'a+'); fcntl.flock(f, fcntl.LOCK_EX);"
    monkeypatch.setattr(sys.stdout, "write", lambda _: time.sleep(0.8))
    outcome = run(
        f"import os, time\nwhile not os.path.exists({held!r}): time.sleep(0.01)\n"
        f"{take} time.sleep(0.1); os._exit(1)",
        f"{take} open({held!r}, 'w'); time.sleep(0.1); os.write(1, b'x\\n'); time.sleep(0.1); os._exit(7)",
        echo=True,
    )
    assert (outcome.code, outcome.rank) == (7, 1)


def test_a_killed_process_counts_as_failed():
    outcome = run("import os; os.kill(os.getpid(), 9)", SLEEP)
    assert (outcome.code, outcome.rank) == (128 + 9, 0)


def test_who_does_not_stop_is_killed():
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on'); time.sleep(60)"
    start = time.monotonic()
    outcome = run(stubborn, "import time; time.sleep(0.5); raise SystemExit(4)", grace=0.3)
    assert (outcome.code, outcome.rank) == (4, 1)
    assert time.monotonic() - start < 10


def test_what_a_rank_starts_ends_with_it(tmp_path):
    # Rank 0 ends well and leaves something behind, then rank 1 fails and does so too.
    start = "import subprocess, os, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    done = str(tmp_path / "done")
    outcome = run(
        f"{start}; open({done!r}, 'w')",
        f"{start}\nwhile not os.path.exists({done!r}): time.sleep(0.01)\nraise SystemExit(5)",
    )
    assert outcome.code == 5
    deadline = time.monotonic() + 5
    while any(alive(int(text)) for text in outcome.stdout) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [alive(int(text)) for text in outcome.stdout] == [False, False]


def test_time_limit():
    outcome = run(SLEEP, timeout=0.2)
    assert (outcome.code, outcome.rank) == (124, None)
    assert outcome.reason == "stopped after the time limit of 0.2 s"


def test_unknown_command_is_an_error_before_anything_starts(tmp_path):
    touch = Command(["touch", str(tmp_path / "started")], os.environ)
    with pytest.raises(
        ValueError, match="got 'no-such-command', which is not on PATH: give the path"
    ):
        supervise([touch, Command(["no-such-command"], os.environ)])
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("body", "code", "printed"),
    [
        ("time.sleep(60)", 128 + 15, ""),
        (
            "signal.signal(15, lambda *_: (print('saved'), sys.exit())); ready(); time.sleep(60)",
            0,
            "saved\n",
        ),
    ],
    ids=["dies", "ends well"],
)
def test_signal_is_passed_on(tmp_path, body, code, printed):
    ready = (
        f"import signal, sys, time, pathlib; ready = pathlib.Path({str(tmp_path / 'up')!r}).touch;"
    )
    send_when(tmp_path / "up", signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    outcome = run(f"{ready} {'' if 'ready' in body else 'ready();'} {body}")
    assert (outcome.code, outcome.signal) == (code, signal.SIGTERM)
    assert outcome.reason == "stopped by SIGTERM"
    assert outcome.stdout[0] == printed
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_kills(tmp_path):
    stubborn = f"import signal, time, pathlib; signal.signal(2, signal.SIG_IGN); pathlib.Path({str(tmp_path / 'up')!r})"
    send_when(tmp_path / "up", signal.SIGINT, signal.SIGINT)
    outcome = run(f"{stubborn}.touch(); time.sleep(60)", grace=60)
    assert (outcome.code, outcome.signal) == (128 + signal.SIGINT, signal.SIGINT)


def test_a_signal_that_does_not_stop_is_passed_on_too(tmp_path):
    source = (
        "import signal, sys, time, pathlib; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9));"
        f"pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(60)"
    )
    send_when(tmp_path / "up", signal.SIGUSR1)
    outcome = run(source)
    assert (outcome.code, outcome.rank, outcome.signal) == (9, 0, None)


def test_ranks_get_their_cores():
    cores = sorted(os.sched_getaffinity(0))
    source = [*PYTHON, "import os; print(sorted(os.sched_getaffinity(0)))"]
    commands = [Command(source, os.environ, frozenset({core})) for core in cores[:2]]
    outcome = supervise(commands, echo=False, capture=True)
    assert list(outcome.stdout) == [f"[{core}]\n" for core in cores[:2]]
    assert sorted(os.sched_getaffinity(0)) == cores


def test_environment():
    env = launch.environment(1, 2, "127.0.0.1:5", devices=3, base={"HOME": "h", "https_proxy": "p"})
    assert env["HOME"] == "h"
    assert env["no_proxy"] == "127.0.0.1"
    assert env["FDP_COORDINATOR_ADDRESS"] == "127.0.0.1:5"
    assert (env["FDP_NUM_PROCESSES"], env["FDP_PROCESS_ID"]) == ("2", "1")
    assert (env["JAX_NUM_CPU_DEVICES"], env["FDP_LOCAL_DEVICE_IDS"]) == ("3", "3,4,5")
    assert "no_proxy" not in launch.environment(0, 1, "127.0.0.1:5", base={})


def test_at_least_two_xla_threads(monkeypatch):
    monkeypatch.setattr(launch, "available_cores", lambda: 8)
    threads = [launch.environment(0, n, "h:1", base={})["NPROC"] for n in (1, 2, 4, 8, 16)]
    assert threads == ["8", "4", "2", "2", "2"]
    assert launch.environment(0, 8, "h:1", threads=3, base={})["NPROC"] == "3"
    # Two devices that share two threads were seen to wait for each other for ever.
    assert launch.environment(0, 8, "h:1", devices=2, base={})["NPROC"] == "8"
    assert launch.environment(0, 8, "h:1", devices=1, base={})["NPROC"] == "2"


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            ValueError, match=rf"expected a free port on 127.0.0.1, got {port} \(.*\): leave"
        ):
            launch.free_port(port=port)
        assert launch.free_port() != port


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    return str(path)


def test_command_runs_a_script_as_python_would(tmp_path, capsys):
    path = script(
        tmp_path,
        "import sys, os\n"
        "print(__name__, sys.argv[1:], sys.path[0] == os.path.dirname(os.path.realpath(__file__)),\n"
        "      'jax' in sys.modules, os.environ['FDP_PROCESS_ID'], os.environ['FDP_NUM_PROCESSES'])\n",
    )
    assert launch.main(["-n", "2", path, "-x", "--n", "5"]) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [f"[{rank}] __main__ ['-x', '--n', '5'] True False {rank} 2" for rank in (0, 1)]


def test_command_runs_a_module(capsys):
    assert launch.main(["-n", "1", "-m", "this"]) == 0
    assert "[0] Beautiful is better than ugly." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "code", "error"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no data')", 1, "[0] no data\n"),
        ("import sys; sys.exit()", 0, ""),
        ("def f(): return 1 / 0\nf()", 1, "[0] ZeroDivisionError: division by zero\n"),
    ],
)
def test_exit_code_of_a_script(tmp_path, capsys, source, code, error):
    # The handler stands for JAX's, which waits for ranks that do not come.
    path = script(tmp_path, f"import atexit\natexit.register(print, 'handler')\n{source}")
    assert launch.main(["-n", "1", path]) == code
    captured = capsys.readouterr()
    assert ("handler" in captured.out) == (code == 0)
    assert error in captured.err
    assert "child.py" not in captured.err
    assert "runpy" not in captured.err
    if code:
        assert captured.err.endswith(f"fdp.launch: process 0 failed with exit code {code}\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["-n", "0", "x.py"], "expected a whole number of at least 1, got '0'"),
        (["-n", "two", "x.py"], "expected a whole number of at least 1, got 'two'"),
        (
            ["-n", "2", "missing.py"],
            "expected a Python file, got 'missing.py', which is none (a module? add -m)",
        ),
        (["-n", "2"], "required: SCRIPT"),
        (["x.py"], "required: -n"),
    ],
)
def test_command_line_errors(capsys, arguments, error):
    with pytest.raises(SystemExit) as end:
        launch.main(arguments)
    assert end.value.code == 2
    assert error in capsys.readouterr().err


def test_command_names_a_taken_port(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(SystemExit):
        launch.main(["-n", "1", "--port", str(server.getsockname()[1]), script(tmp_path, "")])
    assert "expected a free port" in capsys.readouterr().err


@pytest.fixture
def initialized(monkeypatch):
    """What jax.distributed.initialize would have been called with, and no launcher's variables."""
    calls = []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: bool(calls))
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **k: calls.append((a, k)))
    for name in (
        "FDP_COORDINATOR_ADDRESS",
        "FDP_NUM_PROCESSES",
        "FDP_PROCESS_ID",
        "FDP_LOCAL_DEVICE_IDS",
    ):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_initialize_reads_the_launcher_and_nothing_else(initialized, monkeypatch):
    for name, value in launch.environment(1, 2, "127.0.0.1:5", devices=2, base={}).items():
        monkeypatch.setenv(name, value)
    launch.initialize(initialization_timeout=9)
    launch.initialize()  # does nothing
    ((positional, named),) = initialized
    assert positional == ("127.0.0.1:5", 2, 1, [2, 3])
    # Inside a Slurm job JAX would otherwise mix in what Slurm says.
    assert named["cluster_detection_method"] == "deactivate"
    assert named["coordinator_bind_address"] == "127.0.0.1:5"
    assert named["initialization_timeout"] == 9


def test_initialize_leaves_detection_to_jax(initialized):
    launch.initialize()
    assert initialized == [((), {"initialization_timeout": 300})]


@pytest.mark.parametrize(
    "wrong",
    [
        {"FDP_PROCESS_ID": "0"},
        {"FDP_COORDINATOR_ADDRESS": "h:1", "FDP_NUM_PROCESSES": "2", "FDP_PROCESS_ID": "2"},
        {"FDP_COORDINATOR_ADDRESS": "h:1", "FDP_NUM_PROCESSES": "two", "FDP_PROCESS_ID": "0"},
    ],
)
def test_initialize_refuses_half_an_environment(initialized, monkeypatch, wrong):
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"let fdp\.launch set these variables, or unset them all"):
        launch.initialize()
    assert initialized == []


def python(source, **env):
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("FDP_", "SLURM_", "OMPI_", "JAX_NUM"))
    }
    return subprocess.run(
        [sys.executable, "-c", source],
        env={**clean, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_initialize_without_anybody_who_says_who_takes_part():
    done = python("import fdp.launch; fdp.launch.initialize()")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "ValueError: expected a process started by fdp.launch, srun, mpirun, or on Cloud TPU or Kubernetes; "
        "got one that nothing tells who else takes part: start it with `python -m fdp.launch -n 2 script.py`"
    )


def test_initialize_under_slurm():
    done = python(
        "import jax, fdp.launch; fdp.launch.initialize(); print(jax.distributed.is_initialized())",
        SLURM_JOB_ID=str(os.getpid()),  # JAX makes the port from it
        SLURM_STEP_NODELIST="localhost",
        SLURM_NTASKS="1",
        SLURM_PROCID="0",
        SLURM_LOCALID="0",
    )
    assert done.stdout == "True\n", done.stderr


def test_two_processes_sum_and_one_fails(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    path = script(
        tmp_path,
        "import fdp.launch, jax, os, sys, time\n"
        "from jax.experimental import multihost_utils\n"
        "fdp.launch.initialize()\n"
        "total = multihost_utils.process_allgather(jax.numpy.array([jax.process_index() + 1.0])).sum()\n"
        "print('devices', jax.device_count(), 'sum', total)\n"
        "if jax.process_index() == 0:\n"
        "    open(sys.argv[1], 'w')\n"
        "    time.sleep(120)\n"
        "while not os.path.exists(sys.argv[1]):\n"
        "    time.sleep(0.01)\n"
        "sys.exit(7)\n",
    )
    start = time.monotonic()
    assert (
        launch.main(
            ["-n", "2", "--devices", "2", "--grace", "0.5", path, str(tmp_path / "printed")]
        )
        == 7
    )
    assert time.monotonic() - start < 60
    out = capsys.readouterr().out.splitlines()
    assert {"[0] devices 4 sum 3.0", "[1] devices 4 sum 3.0"} <= set(out)
