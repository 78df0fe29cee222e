"""Triton templates whose input is the producer's own code."""

from __future__ import annotations
