"""Kernels in C for the CPU, compiled at first use: products, attention, and a whole decoding step."""
