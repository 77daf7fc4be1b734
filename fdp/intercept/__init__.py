"""Rewrites a traced gradient so that reductions sit where gradients are born, inside scans too.

    closed jaxpr --analyze--> Interception (loops, placements, report) --evaluate--> outputs, reduced where it says

Knows nothing of buckets, hooks or axes: how slices are reduced is the caller's function.
"""

from fdp.intercept._analyze import Interception, Placement, analyze
from fdp.intercept._evaluate import Evaluation, evaluate
from fdp.intercept._loop import Loop

__all__ = ["Evaluation", "Interception", "Loop", "Placement", "analyze", "evaluate"]
