"""Operators that torch cannot fuse: a Triton program for GPUs, and a reference in torch for other devices."""
