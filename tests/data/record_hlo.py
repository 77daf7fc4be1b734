"""Records the compiled texts that the tests of `fdp.inspect` read, so that they need no compilers.

    make test-aot                                            # makes .venv-aot, with the compilers
    .venv-aot/bin/python tests/data/record_hlo.py            # all
    .venv-aot/bin/python tests/data/record_hlo.py cpu        # one target

File names carry the target and the release of jax. The tables of source files and the metadata are left out: they
hold the paths of the machine.
"""

import gzip
import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

# Before jax starts; the same as fdp.aot.ENVIRONMENT, which cannot be asked, for it imports jax.
os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
)

import inspect_programs  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402

import fdp.aot  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
TARGETS = {"cpu": "cpu", "gpu": "h100:8", "tpu": "v5e:2x4"}
WANTED = ("naive", "chained", "scanned", "scanned_delayed", "kinds", "convolutional")


def text_of(program: str, target: str) -> str:
    if target == "cpu":
        mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")), ("data",))
    else:
        mesh = fdp.aot.mesh(target)
    options = inspect_programs.TPU_OPTIONS if target.startswith("v") else None
    text = inspect_programs.lower(program, mesh).compile(compiler_options=options).as_text()
    return without_sources(text)


def without_sources(text: str) -> str:
    tables = r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*\n*"
    text = re.sub(tables, "", text, flags=re.MULTILINE)
    return re.sub(r' ?(?:op_name="[^"]*"|stack_frame_id=\d+)', "", text)


def main() -> None:
    release = ".".join(jax.__version__.split(".")[:2])
    for platform in sys.argv[1:] or TARGETS:
        for program in WANTED:
            path = HERE / f"{platform}-jax{release}.{program}.hlo.txt.gz"
            text = text_of(program, TARGETS[platform])
            path.write_bytes(gzip.compress(text.encode(), mtime=0))
            print(f"{path.name}: {len(text):,} bytes, {path.stat().st_size:,} on disk")


if __name__ == "__main__":
    main()
