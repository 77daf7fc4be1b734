"""The torch halves of the pairs. Only these modules, and `benchmarks.ways.in_torch`, import torch at their top."""
