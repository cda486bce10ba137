"""The Llama model family on graphrt's operators, and model loading."""
