"""Text generation: a continuous-batching scheduler over a runtime."""
