"""Bit-level references, written from the format definitions alone and in numpy alone."""
