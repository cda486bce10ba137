"""Operators of decoder models, other than matrix products and attention: norms, activation, sampling."""
