"""The Llama family of models on graphrt's operators, and how to load them."""
