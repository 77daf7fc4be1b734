"""fdp: functional data parallel training in JAX."""

from fdp import aot, hooks, inspect, pack, schedules
from fdp.accumulate import accumulate
from fdp.backward import reduce_in_backward
from fdp.compat import varying
from fdp.data import global_batch
from fdp.grad import value_and_grad
from fdp.options import suggested_bucket_bytes, suggested_compiler_options, usable_options
from fdp.order import gradient_ready_order, unused_leaves
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
    "aot",
    "bucketed",
    "data_parallel",
    "global_batch",
    "gradient_ready_order",
    "hooks",
    "inspect",
    "pack",
    "plan_buckets",
    "reduce_gradients",
    "reduce_in_backward",
    "schedules",
    "suggested_bucket_bytes",
    "suggested_compiler_options",
    "unused_leaves",
    "usable_options",
    "value_and_grad",
    "varying",
]
