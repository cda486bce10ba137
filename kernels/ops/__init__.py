"""What a decoder model needs beside matrix products and attention: norms, activation, sampling."""
