"""Requests that stay on the device between launches."""
