"""benchmarks.cluster: wires that are as slow as asked, and nothing left of them afterwards."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.cluster import (
    Cluster,
    ClusterUnavailable,
    LinkReport,
    UnreachableRate,
    __main__,
    network,
    remove_stale,
    shape,
    smoke,
    unavailable_reason,
)

ROOT = Path(__file__).parent.parent
PYTHON = [sys.executable, "-I", "-S", "-c"]
REASON = unavailable_reason()
needs_wires = pytest.mark.skipif(REASON is not None, reason=f"no network namespaces: {REASON}")
QUIET = {"echo": False, "capture": True}


def left(pid=None):
    """Namespaces, and their folders in /etc/netns, of this process or another."""
    mark = f"fdp-{os.getpid() if pid is None else pid}-"
    folders = [folder for folder in (Path("/run/netns"), Path("/etc/netns")) if folder.is_dir()]
    return sorted(p.name for folder in folders for p in folder.iterdir() if p.name.startswith(mark))


def running(mark):
    """Processes with this text among their arguments."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if mark.encode() in line.split(b"\0"):
            found.append(int(folder.name))
    return found


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("text", "bits"), [("400mbit", 4e8), ("1.5gbit", 1.5e9), ("1000kbit", 1e6), (" 1GBIT ", 1e9)]
)
def test_rates(text, bits):
    assert shape.parse_rate(text) == bits


@pytest.mark.parametrize("text", ["400", "400mb", "mbit", "-1mbit", "1 mbit/s", ""])
def test_what_is_not_a_rate(text):
    with pytest.raises(
        ValueError, match=r"expected a rate such as 400mbit or 1gbit \(units bit, .*\), got"
    ):
        shape.parse_rate(text)


def test_a_rate_that_is_too_low():
    with pytest.raises(ValueError, match="expected a rate of at least 1mbit, got '999kbit'"):
        shape.parse_rate("999kbit")


def test_latencies():
    assert [shape.parse_time(text) for text in ("0ms", "0.1ms", "250us", "1s")] == [
        0,
        1e-4,
        2.5e-4,
        1,
    ]
    with pytest.raises(ValueError, match=r"expected a latency such as 0\.1ms"):
        shape.parse_time("fast")
    with pytest.raises(ValueError, match="expected a latency of at most 1s, got '2s'"):
        shape.parse_time("2s")


@pytest.mark.parametrize("rate", [1e6, 1e8, 4e8, 1e9, 1e10, 1e11])
def test_a_segment_with_its_headers_fits_in_a_burst(rate):
    # tbf cuts up what is larger than its burst, which costs more than it may.
    packets = -(-shape.segment_bytes(rate) // 1448)
    assert shape.segment_bytes(rate) + 66 * packets <= shape.burst_bytes(rate)
    assert shape.burst_bytes(rate) >= shape.MTU + 14


def test_tc_arguments():
    assert shape.tbf(4e8) == "tbf rate 400000000bit burst 20625 latency 100ms"
    assert shape.netem(1e-4) == "netem delay 100us limit 100000"


REPORT = LinkReport(rate=4e8, goodput=3.8e8, latency=1e-3)


@pytest.mark.parametrize(
    ("rate", "latency", "message"),
    [
        (1e9, 0.0, r"expected 1,000 Mbit/s between ranks, measured 400: ask for less than that"),
        (1e8, 0.0, r"expected 100 Mbit/s between ranks, measured 400: the wire is not slowed down"),
        (4e8, 2e-3, r"expected 2 ms one way, measured 1\.000: packets are not held back"),
    ],
)
def test_wires_that_are_not_as_asked(rate, latency, message):
    with pytest.raises(UnreachableRate, match=message):
        REPORT.check(rate, latency)


def test_wires_that_are_as_asked():
    REPORT.check(None, 0.0)
    REPORT.check(4e8, 1e-3)
    text = "400.0 Mbit/s on the wire (380.0 of payload) each way, 1.000 ms one way"
    assert str(REPORT) == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "expected 1 to 64 ranks, got 0"),
        ({"size": 2, "cores": 0}, "expected at least 1 core a rank, got 0"),
        ({"size": 60, "cores": 60, "pin": True}, "expected 3600 cores for 60 ranks of 60, got"),
        (
            {"size": 2, "loopback": True, "rate": "1gbit"},
            "expected no rate and no latency with loopback",
        ),
        ({"size": 2, "nice": 20}, "expected a priority from -20 to 19, got nice=20"),
        ({"size": 2, "rate": "quick"}, "expected a rate such as"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        Cluster(**arguments)


@pytest.mark.parametrize(
    ("platform", "user", "tools", "message"),
    [
        ("darwin", 0, True, "need Linux, this is darwin"),
        ("linux", 1000, True, "need root, this user is not"),
        ("linux", 0, False, "ip and tc not found (install the package iproute2)"),
    ],
)
def test_without_root_or_tools_it_says_so_and_offers_loopback(
    monkeypatch, platform, user, tools, message
):
    monkeypatch.setattr(network.sys, "platform", platform)
    monkeypatch.setattr(network.os, "geteuid", lambda: user)
    if not tools:
        monkeypatch.setattr(network.shutil, "which", lambda _: None)
    with pytest.raises(ClusterUnavailable) as error, Cluster(2, rate="1gbit"):
        pass
    assert message in str(error.value)
    assert "Without wires: --loopback, or Cluster(..., loopback=True)" in str(error.value)
    with Cluster(2, loopback=True) as cluster:
        assert cluster.addresses == ["127.0.0.1", "127.0.0.1"]


def test_loopback_runs_and_measures():
    source = "import os; print(*(os.environ[n] for n in ('RANK', 'FDP_PROCESS_ID', 'WORLD_SIZE', 'NPROC', 'X')))"
    with Cluster(2, loopback=True) as cluster:
        outcome = cluster.run([[*PYTHON, source]] * 2, env={"X": "y"}, **QUIET)
        assert outcome.stdout == ("0 0 2 2 y\n", "1 1 2 2 y\n")
        report = cluster.measure(0.1)
    assert report.rate > 1e8
    assert 0 < report.latency < 0.1


def test_a_failing_rank_gives_the_code():
    with Cluster(2, loopback=True) as cluster:
        outcome = cluster.run([["sleep", "60"], ["sh", "-c", "exit 6"]], **QUIET)
    assert (outcome.code, outcome.rank) == (6, 1)


def test_priority():
    with Cluster(1, loopback=True, nice=5) as cluster:
        source = "import os; print(os.nice(0)); f = '/proc/self/autogroup'"
        source += "; print(open(f).read().split()[-1] if os.path.exists(f) else 5)"
        expected = f"{min(os.nice(0) + 5, 19)}\n5\n"
        assert cluster.run([[*PYTHON, source]], **QUIET).stdout == (expected,)


def test_run_refuses():
    with Cluster(2, loopback=True) as cluster:
        with pytest.raises(ValueError, match="expected one command for each of 2 ranks, got 1"):
            cluster.run([["true"]])
        with pytest.raises(
            ValueError, match=r"expected commands that can be run, got \['nothing-of-that-name'\]"
        ):
            cluster.run([["true"], ["nothing-of-that-name"]])
    with pytest.raises(ValueError, match="use it in `with`"):
        Cluster(2).run([["true"]] * 2)


def test_command_line_runs_scripts_and_modules(capfd, tmp_path):
    # As fdp.launch does: without the exit handlers, in which JAX waits for the others, after a failure.
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, sys; atexit.register(print, 'handler'); sys.exit(int(sys.argv[1]))"
    )
    assert __main__.main(["-n", "1", "--loopback", "--", str(script), "4"]) == 4
    assert "handler" not in capfd.readouterr().out
    assert __main__.main(["-n", "1", "--loopback", "--", "-m", "this"]) == 0
    assert "[0] Beautiful is better than ugly." in capfd.readouterr().out


def test_command_line(capfd):
    assert __main__.main(["-n", "2", "--loopback", "--", "sh", "-c", "echo $RANK"]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 0", "[1] 1"]
    assert __main__.main(["-n", "1", "--loopback", "--", "sh", "-c", "exit 6"]) == 6
    assert "process 0 failed with exit code 6" in capfd.readouterr().err
    for arguments, message in [
        (["-n", "2"], "expected a command after --"),
        (["measure", "-n", "1"], "expected at least 2 ranks"),
        (
            ["--loopback", "--rate", "1gbit", "--", "true"],
            "expected no rate and no latency with loopback",
        ),
    ]:
        with pytest.raises(SystemExit):
            __main__.main(arguments)
        assert message in capfd.readouterr().err


def test_fit_of_the_smoke_run():
    sizes = [1e3, 1e5, 1e7]
    alpha, beta = smoke.fit(sizes, [2e-3 + size / 5e7 for size in sizes])
    assert alpha == pytest.approx(2e-3)
    assert beta == pytest.approx(5e7)


HOST = """
import json, os, socket
sees = {"own": socket.gethostbyname(socket.gethostname()), "other": socket.gethostbyname("rank1")}
sees["interfaces"] = sorted(name for _, name in socket.if_nameindex())
sees["cores"] = sorted(os.sched_getaffinity(0))
sees["ipv6"] = open("/proc/net/if_inet6").read() if os.path.exists("/proc/net/if_inet6") else ""
print(json.dumps(sees))
"""


@needs_wires
def test_hosts_and_wires():
    # Slow, so that the burst lasts 2 ms: a kernel that comes round to its timers later than that loses tokens.
    with Cluster(2, rate="20mbit") as cluster:
        assert cluster.report is not None
        assert 0.95 * 20e6 < cluster.report.rate < 1.05 * 20e6
        assert len(left()) == 2 * 2 + 1  # two hosts with a folder each, and the switch
        outcome = cluster.run([[*PYTHON, HOST]] * 2, **QUIET)
        # Another one at the same time, with the same addresses, does not disturb it.
        with Cluster(3, check=False) as other:
            assert other.run([["true"]] * 3).code == 0
    assert outcome.code == 0, outcome.stderr
    for rank, text in enumerate(outcome.stdout):
        sees = json.loads(text)
        assert sees["own"] == f"10.77.0.{rank + 1}"
        assert sees["other"] == "10.77.0.2"
        assert sees["interfaces"] == ["eth0", "lo"]
        assert sees["ipv6"] == ""  # no IPv6
        if cluster.cpus is not None:
            assert sees["cores"] == sorted(cluster.cpus[rank])
            assert len(sees["cores"]) == 1
    assert left() == []


@needs_wires
def test_latency():
    with Cluster(2, rate="400mbit", latency="1ms", check=False) as cluster:
        report = cluster.measure(0.1)
        assert cluster.delayed_by in ("netem", "relay")
    assert 1e-3 < report.latency < 10e-3
    assert left() == []


@needs_wires
def test_a_rate_that_cannot_be_reached(capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.cluster.cluster._TRIES", (0.1, 0.1))
    assert __main__.main(["--rate", "900gbit", "--", "true"]) == 3
    assert "expected 900,000 Mbit/s between ranks, measured" in capsys.readouterr().err
    assert left() == []


def use_and_leave(how):
    with Cluster(2, check=False):
        assert left() != []
        if how == "error":
            raise KeyError
        signal.raise_signal(how)


@needs_wires
@pytest.mark.parametrize(
    ("how", "error"),
    [("error", KeyError), (signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)],
)
def test_nothing_is_left(how, error):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(error):
        use_and_leave(how)
    assert left() == []
    assert signal.getsignal(signal.SIGTERM) is before


@needs_wires
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_ranks_run(number, code):
    def send():
        until(lambda: len(running("61.25")) == 2)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        result = __main__.main(["--no-check", "--", "sleep", "61.25"])
    except SystemExit as end:
        result = end.code
    thread.join()
    assert result == code
    assert left() == []
    assert running("61.25") == []


@needs_wires
def test_half_a_cluster_is_removed_too(monkeypatch):
    def fail(*_):
        raise ClusterUnavailable("no such qdisc")

    monkeypatch.setattr(network.Network, "_shape", fail)
    with pytest.raises(ClusterUnavailable, match="no such qdisc"), Cluster(2, rate="1gbit"):
        pass
    assert left() == []


@needs_wires
def test_a_killed_owner_is_cleaned_up_after():
    command = "-m benchmarks.cluster -n 2 --no-check --latency 1ms -- sleep 62.25"
    owner = subprocess.Popen(
        [sys.executable, *command.split()], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: len(running("62.25")) == 3)  # with the owner itself
        assert len(left(owner.pid)) == 5
        owner.kill()
        owner.wait()
        # It could not clean up, so the next one does; what belongs to the living stays.
        with Cluster(2, check=False):
            assert left(owner.pid) == []
            remove_stale()
            assert len(left()) == 5
        assert running("62.25") == []
    finally:
        owner.kill()
        owner.wait()


@needs_wires
def test_collectives_cross_the_wire(capsys):
    # The command itself compares the bytes that left through the wire with those of the arrays.
    # As slow as above: a wire that other tests keep from its rate would be refused.
    code = smoke.main(["--rate", "20mbit", "--sizes", "100000", "500000", "--repeats", "3"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    row = captured.out.splitlines()[3].split()
    assert row[0] == "500,000"
    # 0.2 s at line rate, of which a burst's worth is free.
    assert 0.195 < float(row[1]) < 5
