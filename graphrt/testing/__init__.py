"""Testing kit: numerics, poison, one timer, and the repaired Triton interpreter. Imports without CUDA."""
