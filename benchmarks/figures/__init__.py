"""The paper's figures, measured again: PyTorch DDP and fdp side by side on the same wires.

Each is a command, `python -m benchmarks.figures.NAME` or `fdp bench NAME`, with `--quick` (under two minutes) and full
sizes, and writes `benchmarks/results/NAME.json` and `NAME.png`; `--draw-only` draws the picture again from the JSON.
`python -m benchmarks.figures.table` writes the table of docs/benchmarks.md from those files.

A figure's module has `measure(args, keep) -> dict`, `draw(result) -> Figure` and `main(argv) -> int`;
`benchmarks.figures.runs` has what they share.
"""
