"""docs/support.md says what the registry says. EXPECTTEST_ACCEPT=1 rewrites it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inductor_ext import registry, support
from inductor_ext.kernels import load

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
START, END = "<!-- table -->\n", "<!-- end -->\n"


@pytest.mark.skipif(
    load().cpu is None or load().cuda is None, reason="needs the compiled libraries"
)
def test_the_page_is_true() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    said, _, after = rest.partition(END)
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        PAGE.write_text(before + START + support.markdown() + END + after, encoding="utf-8")
    else:
        assert said == support.markdown(), "EXPECTTEST_ACCEPT=1 pytest tests/test_support.py"


def test_every_op_of_ours_has_a_row() -> None:
    rows = {row.op: row for row in support.table()}
    names = [n for n in map(str, registry.contracts()) if n.startswith("inductor_ext.")]
    assert sorted(rows) == sorted(n.split(".")[1] for n in names)
    assert rows["quantize_fp8_row"].compiled_on == "CPU, sm_89 and later"
    assert rows["scaled_mm"].strategy == "its own kernel"
