"""Command-line benchmarks: workloads, timing and reports. The library does not import this package."""
