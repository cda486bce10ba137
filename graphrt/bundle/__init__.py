"""Replay bundles: recorded launches that run again in another process."""
