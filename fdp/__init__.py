"""fdp: functional data parallel training in JAX."""

from fdp import hooks, pack, schedules
from fdp.accumulate import accumulate
from fdp.compat import varying
from fdp.data import global_batch
from fdp.plan import Bucket, BucketPlan, plan_buckets
from fdp.reduce import bucketed, reduce_gradients
from fdp.state import StepInfo, TrainState
from fdp.train import Trainer, data_parallel

__version__ = "0.1.0"
__all__ = [
    "Bucket",
    "BucketPlan",
    "StepInfo",
    "TrainState",
    "Trainer",
    "accumulate",
    "bucketed",
    "data_parallel",
    "global_batch",
    "hooks",
    "pack",
    "plan_buckets",
    "reduce_gradients",
    "schedules",
    "varying",
]
