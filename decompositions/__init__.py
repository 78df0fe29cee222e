"""Ops in terms of ATen, one file a family; the reference that every other implementation meets.

Imports torch only.
"""
