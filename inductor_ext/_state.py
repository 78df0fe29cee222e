"""The one value that traced code reads: which mode the compiler is in.

``mode`` is "off", or "on:<digest>" where the digest covers the configuration and the sources
of every registered op.  The public API reads it, so Dynamo guards it: a flip of
``config.enabled`` (or a late registration) takes effect on the next call of a function that is
already compiled, and returning to an earlier state finds the earlier code again.
Written only by ``_install``.
"""

mode: str = "off"
