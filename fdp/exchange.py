"""What processes tell each other from host to host: short texts, within a time-out, whatever devices do.

Collectives wait without end for a process that does something else. Here every process leaves its text in the
key-value store of ``jax.distributed`` and reads the others'; one that does not come in time is named, together with
the last place it was seen at.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import time
import urllib.parse
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from fdp import compat
from fdp.leaves import path_string

DEFAULT_TIMEOUT = 300.0  # seconds, as jax.distributed.initialize waits
_COMPLETE, _GIVEN_UP = "complete", "given up"

# Keys of the store live as long as the run, so a second exchange of the same name needs new ones. Every process
# counts alike, because every process runs the same program; where it does not, the exchange times out and says so.
_rounds: collections.defaultdict[str, itertools.count[int]] = collections.defaultdict(
    itertools.count
)


def gather(name: str, text: str, *, timeout: float = DEFAULT_TIMEOUT) -> list[str]:
    """Every process's text, in order of process. All processes call it, with the same name.

    Args:
      name: what the exchange is about; different exchanges of one name follow each other.
      text: this process's; any length.
      timeout: seconds to wait for the others.

    Raises:
      TimeoutError: in every process, if one did not arrive in time; names those that are missing. The first process
        to run out of time decides for all, also for those that come later.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout <= 0:
        raise ValueError(
            f"expected timeout to be a positive number of seconds, got {timeout!r}: write for example timeout=60."
        )
    found = compat.coordination()
    if found is None:
        return _gather_by_collective(text)
    client, mine, number = found
    if number == 1:
        return [text]
    round_number = count(name)
    folder = _folder(name, round_number)
    _say_where(client, mine, f"waiting at {name!r} ({_nth(round_number)} time)")
    client.key_value_set(f"{folder}{mine}", text)
    texts = _read_all(client, folder, number, timeout)
    # The first to be done, or to be out of patience, decides for all: nobody goes on while another gives up.
    verdict = _COMPLETE if len(texts) == number else _GIVEN_UP
    verdict = _decide(client, folder, verdict)
    if verdict != _COMPLETE:
        raise TimeoutError(_who_is_missing(client, name, texts, number, timeout))
    texts = texts if len(texts) == number else _read(client, folder)
    _say_where(client, mine, f"past {name!r} ({_nth(round_number)} time)")
    if round_number:
        # All have written this round, so all have read the one before.
        for key in (mine, "verdict") if mine == 0 else (mine,):
            client.key_value_delete(f"{_folder(name, round_number - 1)}{key}")
    return [texts[process] for process in range(number)]


def processes() -> int:
    """How many processes take part; asks no device if it need not."""
    found = compat.coordination()
    return jax.process_count() if found is None else found[2]


def count(name: str) -> int:
    """How often this process has counted ``name`` before."""
    return next(_rounds[name])


def leave_note(name: str, text: str) -> None:
    """Leaves this process's text of the next exchange for the others, and does not wait for theirs."""
    found = compat.coordination()
    if found is None or found[2] == 1:
        return
    client, mine, _ = found
    client.key_value_set(f"{_folder(name, count(name))}{mine}", text)


def compare(name: str, lines: list[str], *, timeout: float = DEFAULT_TIMEOUT) -> list[list[str]]:
    """Compares what processes say; returns what each says if they differ, nothing if all say the same.

    Only a digest is exchanged as long as nothing differs.

    Raises:
      TimeoutError: as ``gather``.
    """
    text = "\n".join(lines)
    digests = gather(name, hashlib.sha256(text.encode()).hexdigest(), timeout=timeout)
    if len(set(digests)) == 1:
        return []
    return [text.split("\n") for text in gather(f"{name}: details", text, timeout=timeout)]


def describe(tree: Any) -> list[str]:
    """One line per leaf, ``path: dtype[shape]``, then the structure."""
    lines = [
        f"{path_string(path)}: {leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        if hasattr(leaf, "dtype")
        else f"{path_string(path)}: {type(leaf).__name__}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return [*lines, f"structure: {jax.tree.structure(tree)}"]


class Difference(NamedTuple):
    """The first line in which processes differ.

    Attributes:
      processes: those that say anything else than process 0.
      process: the first of them.
      reference: process 0's line, or ``"nothing"``.
      line: ``process``'s line.
    """

    processes: tuple[int, ...]
    process: int
    reference: str
    line: str


def first_difference(described: list[list[str]]) -> Difference:
    """Where descriptions of several processes, not all equal, first differ."""
    reference = described[0]
    others = tuple(p for p, lines in enumerate(described) if lines != reference)
    pairs = itertools.zip_longest(reference, described[others[0]], fillvalue="nothing")
    expected, got = next((a, b) for a, b in pairs if a != b)
    return Difference(others, others[0], expected, got)


def these_processes(processes: tuple[int, ...] | list[int]) -> str:
    """``"process 1"``, ``"processes 1 and 2"``, ``"processes 0, 1, 2 and 60 more"``."""
    if len(processes) == 1:
        return f"process {processes[0]}"
    shown = [str(process) for process in processes[:8]]
    rest = len(processes) - len(shown)
    last = f"{rest} more" if rest else shown.pop()
    return f"processes {', '.join(shown)} and {last}"


def _folder(name: str, round_number: int) -> str:
    return f"fdp/{urllib.parse.quote(name, safe='')}/{round_number}/"


def _nth(round_number: int) -> str:
    return {0: "first", 1: "second", 2: "third"}.get(round_number, f"{round_number + 1}th")


def _say_where(client: Any, process: int, where: str) -> None:
    client.key_value_set(f"fdp at/{process}", where, allow_overwrite=True)


def _read(client: Any, folder: str) -> dict[int, str]:
    """The texts that are there, by process."""
    names = {key.rpartition("/")[2]: text for key, text in client.key_value_dir_get(folder)}
    return {int(name): text for name, text in names.items() if name.isdecimal()}


def _read_all(client: Any, folder: str, processes: int, timeout: float) -> dict[int, str]:
    """All texts, or those that have come when time is up."""
    deadline = time.monotonic() + timeout
    while True:
        texts = _read(client, folder)
        missing = next((p for p in range(processes) if p not in texts), None)
        left = deadline - time.monotonic()
        if missing is None or left <= 0:
            return texts
        try:
            # One is waited for, without polling; by then most of the others are there as well.
            client.blocking_key_value_get(f"{folder}{missing}", max(1, int(left * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def _decide(client: Any, folder: str, verdict: str) -> str:
    """The first verdict that any process has come to."""
    key = f"{folder}verdict"
    try:
        client.key_value_set(key, verdict)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return client.key_value_try_get(key)
    return verdict


def _who_is_missing(
    client: Any, name: str, texts: dict[int, str], processes: int, timeout: float
) -> str:
    missing = [process for process in range(processes) if process not in texts]
    if not missing:
        return (
            f"expected every process at {name!r} within {timeout:g} s, but this one came after others had given up: "
            "look at what held it up, or raise timeout=."
        )
    seen = dict(client.key_value_dir_get("fdp at/"))
    last = seen.get(f"fdp at/{missing[0]}", "nowhere in fdp yet")
    return (
        f"expected all {processes} processes at {name!r} within {timeout:g} s, but {these_processes(missing)} did not "
        f"arrive; process {missing[0]} was last seen {last}. Look at its log: it has failed, is slower than "
        "timeout= allows, or runs another program."
    )


def _gather_by_collective(text: str) -> list[str]:
    """The same through the devices, for runs without ``jax.distributed``'s store: no time-out."""
    if jax.process_count() == 1:
        return [text]
    mine = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(mine.size))).reshape(-1)
    padded = np.zeros(max(1, int(sizes.max())), np.uint8)
    padded[: mine.size] = mine
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]
