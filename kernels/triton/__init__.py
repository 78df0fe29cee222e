"""Kernels written in Triton: imported on first use, since importing Triton takes a while."""
