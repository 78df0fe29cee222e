"""NVFP4 as Inductor IR."""
