"""Ways to train data parallel, behind one interface: PyTorch DDP, plain JAX, and fdp.

    torch                     DDP; options cap=MiB (torch's default: 25, its first bucket 1), view=on|off
                              (gradient_as_bucket_view)
    torch:none                DDP with a hook that communicates nothing
    jax, jax:pmean            shard_map, one pmean of everything; option combiner=on|off|MiB (sizes: GPU and TPU)
    jax:pmap                  pmap, one pmean of everything
    jax:auto                  jit with automatic sharding; option combiner
    jax:none                  jax:pmean without the pmean
    fdp, fdp:ordered          fdp; options cap=MiB, first=MiB (the same as cap), window=N, pack=flat|leaves,
                              via=shard_map|pmap, carry=N (carry_over)
    fdp:serialized            the same with another schedule, without window; also fdp:fused, fdp:unordered
    fdp:none                  fdp's trainer with this rank alone on its mesh

A way is built for a `Setting` (model, mesh, learning rate) and is a `Way`, whose docstring says what its functions do:

    setting = Setting(make_pair("mlp"), mesh, learning_rate=0.01)
    way = build(parse("fdp:cap=4,window=2"), setting)
    state, batch = way.init(*setting.pair.init()), way.place(setting.pair.batch(1024, seed=rank))
    state, loss = way.step(state, batch)
    way.wait(state, loss)

Importing this needs no torch; building a torch way does, and
`benchmarks.rank.connect_torch` before its `init`.
"""

from __future__ import annotations

import importlib.util

from benchmarks import spec
from benchmarks.spec import Spec
from benchmarks.ways import in_fdp, in_jax
from benchmarks.ways.way import AXIS, Setting, Way

__all__ = ["AXIS", "KNOWN", "MissingTorch", "Setting", "Way", "build", "check_torch", "parse"]

KNOWN: dict[str, spec.Known] = {
    "torch": spec.Known(
        {"cap": spec.mebibytes, "view": spec.switch},
        words=("ddp", "none"),
    ),
    "jax": in_jax.KNOWN,
    "fdp": in_fdp.KNOWN,
}


class MissingTorch(ImportError):
    """PyTorch is not installed."""


def parse(text: str) -> Spec:
    """Reads the name of a way.

    Raises:
      ValueError: an unknown way or option, or a wrong value; lists the known ones.
    """
    return spec.parse(text, KNOWN, "way")


def check_torch(asked: Spec) -> None:
    """Checks that the way can be built here.

    Raises:
      MissingTorch: it is torch's, and there is none.
    """
    if asked.name == "torch" and importlib.util.find_spec("torch") is None:
        raise MissingTorch(
            f"expected PyTorch for the way {asked.text!r}, which is not installed: install the extra bench "
            "(pip install 'fdp[bench]', in a clone make bench-deps), or leave the torch ways out"
        )


def build(asked: Spec, setting: Setting) -> Way:
    """The way that ``asked`` names.

    Raises:
      ValueError: options that do not go together, or not with this model or platform.
      MissingTorch: it is torch's, and there is none.
    """
    check_torch(asked)
    if asked.name == "torch":
        from benchmarks.ways import in_torch

        return in_torch.build(asked, setting)
    return {"jax": in_jax, "fdp": in_fdp}[asked.name].build(asked, setting)
