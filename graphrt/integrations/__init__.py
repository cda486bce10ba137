"""Adapters that run graphrt inside other libraries."""
