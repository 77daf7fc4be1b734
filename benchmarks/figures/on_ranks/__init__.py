"""What figures run on every rank, where that is not `benchmarks.rank`."""
