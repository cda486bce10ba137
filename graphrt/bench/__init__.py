"""The benchmarks: what they run, how they time it, what they report. The library never imports this package."""
