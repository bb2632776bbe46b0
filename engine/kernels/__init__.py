"""Kernels of our own, and the torch extensions that they are built into."""
