"""Benchmarks of the command line: workloads, timing and reports. The library does not import this package."""
