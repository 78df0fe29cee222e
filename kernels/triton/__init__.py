"""Triton kernels that the ops call themselves, as they call CUDA ones; imported on first use."""
