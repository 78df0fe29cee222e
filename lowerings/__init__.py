"""Ops as Inductor IR, one file a family; imported only when a registered op is compiled.

``vocabulary`` is the small set of words they are written in, usable by third parties too.
"""
