"""Attention backends: the contract (`base`, `capabilities`), selection (`choice`, `registry`), a module per backend."""
