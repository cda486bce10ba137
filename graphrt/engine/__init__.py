"""The step as it is captured and launched: programs, graphs, launches and their results."""
