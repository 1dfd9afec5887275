"""Measurements: `python -m benchmarks.resnet --json results.json`."""
