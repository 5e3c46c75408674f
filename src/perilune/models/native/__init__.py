"""C kernels for the CPU, compiled at first use: products, attention, and a whole decoding step."""
