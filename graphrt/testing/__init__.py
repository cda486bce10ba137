"""Tests for captured graphs and kernels: `verify`, the pytest plugin, the backend test suite, numerical comparisons,
poison, and checks under the Triton interpreter."""
