"""fdp: functional data parallel training in JAX."""

from fdp import aot, data, hooks, inspect, pack, schedules
from fdp.accumulate import accumulate
from fdp.agree import agree, barrier
from fdp.backward import reduce_in_backward
from fdp.compat import varying
from fdp.data import global_batch
from fdp.finite import describe_nonfinite
from fdp.grad import value_and_grad
from fdp.log import log_data
from fdp.model_state import consistent_model_state
from fdp.options import suggested_bucket_bytes, suggested_compiler_options, usable_options
from fdp.order import gradient_ready_order, unhidden_leaves, unused_leaves
from fdp.plan import Bucket, BucketPlan, plan_buckets
from fdp.reduce import bucketed, reduce_gradients
from fdp.state import StepInfo, TrainState
from fdp.train import Trainer, data_parallel
from fdp.verify import check_replicas

__version__ = "0.1.0"
__all__ = [
    "Bucket",
    "BucketPlan",
    "StepInfo",
    "TrainState",
    "Trainer",
    "accumulate",
    "agree",
    "aot",
    "barrier",
    "bucketed",
    "check_replicas",
    "consistent_model_state",
    "data",
    "data_parallel",
    "describe_nonfinite",
    "global_batch",
    "gradient_ready_order",
    "hooks",
    "inspect",
    "log_data",
    "pack",
    "plan_buckets",
    "reduce_gradients",
    "reduce_in_backward",
    "schedules",
    "suggested_bucket_bytes",
    "suggested_compiler_options",
    "unhidden_leaves",
    "unused_leaves",
    "usable_options",
    "value_and_grad",
    "varying",
]
