"""Lowerings of this family: to come with the next commit."""
