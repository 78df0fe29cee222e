"""The source of a small op package, with numbers that tell which implementation ran.

Every op doubles its input when it runs opaquely.  Its lowering, decomposition and gradient use
other factors, so that a result says which code computed it.
"""

from __future__ import annotations

from pathlib import Path

OPAQUE = 2.0
DEFAULTS = {"lowering": 3.0, "decomposition": 5.0, "gradient": 7.0, "version": "1"}

_INIT = """
import json
from pathlib import Path

import torch

import inductor_ext as ixt

from . import autograd, decomposition, lowering

CALLS = {}
LIBRARY = torch.library.Library("ixt_toy", "DEF")


def define(name):
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")

    def real(x):
        CALLS[name] = CALLS.get(name, 0) + 1
        return x * 2

    LIBRARY.impl(name, real, "CPU")
    torch.library.register_fake(f"ixt_toy::{name}", torch.empty_like, lib=LIBRARY)
    return getattr(torch.ops.ixt_toy, name).default


def double(x):
    return x * 2


ixt.register(
    define("lowered"), reference=double, lowering=lowering.times, autograd=None
)
ixt.register(
    define("by_name"), reference=double, lowering="toy_ops.lowering:times", autograd=None
)
ixt.register(
    define("decomposed"), reference=double, decomposition=decomposition.times, autograd=None
)
ixt.register(
    define("fast"), reference=double, lowering=lowering.times_by_numerics, autograd=None
)
ixt.register(
    define("versioned"),
    reference=double,
    lowering=lowering.times_from_elsewhere,
    autograd=None,
    version=json.loads((Path(__file__).parent / "version.json").read_text())["version"],
)
ixt.register(define("tangent"), reference=double, lowering=lowering.times, autograd=None)
ixt.register(
    define("graded"),
    reference=double,
    lowering=lowering.times,
    autograd=ixt.Autograd(autograd.backward),
)
"""

_LOWERING = """
import json
from pathlib import Path

from inductor_ext import config
from inductor_ext._compat import ir, ops

FACTOR = {lowering}


def multiply(x, factor):
    load, dtype = x.make_loader(), x.get_dtype()
    return ir.Pointwise.create(
        device=x.get_device(),
        dtype=dtype,
        inner_fn=lambda index: ops.mul(load(index), ops.constant(factor, dtype)),
        ranges=x.get_size(),
    )


def times(x):
    return multiply(x, FACTOR)


def times_by_numerics(x):
    return multiply(x, 100.0 if config.numerics == "fast" else FACTOR)


def times_from_elsewhere(x):
    return multiply(x, json.loads((Path(__file__).parent / "version.json").read_text())["factor"])
"""

_DECOMPOSITION = """
def times(x):
    return x * {decomposition}
"""

_AUTOGRAD = """
import torch


def backward(ctx, grad):
    return torch.ops.ixt_toy.tangent.default(grad) * {gradient}
"""


def write(folder: Path, **changes: float | str) -> str:
    """Write the package ``toy_ops`` into ``folder`` and return the folder's name."""
    values = {**DEFAULTS, **changes}
    package = folder / "toy_ops"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_INIT)
    (package / "lowering.py").write_text(_LOWERING.replace("{lowering}", str(values["lowering"])))
    (package / "decomposition.py").write_text(
        _DECOMPOSITION.replace("{decomposition}", str(values["decomposition"]))
    )
    (package / "autograd.py").write_text(_AUTOGRAD.replace("{gradient}", str(values["gradient"])))
    factor = 11.0 if values["version"] == "1" else 13.0
    (package / "version.json").write_text(
        f'{{"version": "{values["version"]}", "factor": {factor}}}'
    )
    return str(folder)
