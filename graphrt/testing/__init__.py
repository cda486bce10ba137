"""Testing kit: `verify` for captured steps, a pytest plugin, the contract of backends, numerics, poison, and the
repaired Triton interpreter. Imports without CUDA."""
