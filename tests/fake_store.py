"""Several processes played by threads, with a key-value store in memory that behaves like JAX's.

It raises what the real one raises (``jax.errors.JaxRuntimeError`` with these words, jax 0.10 to 0.12); the tests with
real processes check that the two agree.
"""

import collections
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from fdp import compat, exchange


class Store:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: timed out with key: {key}")
            return self.values[key]

    def key_value_try_get(self, key: str) -> str:
        with self.changed:
            if key not in self.values:
                raise jax.errors.JaxRuntimeError(f"NOT_FOUND: Config key {key} not found.")
            return self.values[key]

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        with self.changed:
            return [(k, v) for k, v in self.values.items() if k.startswith(folder)]

    def key_value_delete(self, key: str) -> None:
        with self.changed:
            self.values.pop(key, None)


class Processes:
    """``run(fn, ...)``: one function per process; returns what each returned, or the exception it raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.count, self.store, self.mine = count, Store(), threading.local()
        self.rounds = [collections.defaultdict(itertools.count) for _ in range(count)]
        monkeypatch.setattr(
            compat, "coordination", lambda: (self.store, self.mine.index, self.count)
        )
        monkeypatch.setattr(
            exchange, "count", lambda name: next(self.rounds[self.mine.index][name])
        )

    def run(self, *functions: Any) -> list[Any]:
        def play(index: int) -> Any:
            self.mine.index = index
            try:
                return functions[index]()
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(play, range(self.count)))

    def everywhere(self, function: Any) -> list[Any]:
        return self.run(*[lambda index=index: function(index) for index in range(self.count)])
