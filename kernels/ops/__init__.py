"""Operators of decoder models other than attention: products, norms, activation, sampling and collectives."""
