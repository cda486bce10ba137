"""Attention backends: the contract (`base`), the choice (`registry`), and one module per backend."""
