"""The parity harness: does a registered op keep its contract, bit for bit?

from inductor_ext.testing import check_op
check_op(torch.ops.mine.op.default, devices=("cpu", "cuda"))
"""

from __future__ import annotations

from .compare import ParityError, bits_of, bitwise_mismatches, require_equal
from .harness import ALL, Report, check_op
from .samples import Sample, samples

__all__ = [
    "ALL",
    "ParityError",
    "Report",
    "Sample",
    "bits_of",
    "bitwise_mismatches",
    "check_op",
    "require_equal",
    "samples",
]
