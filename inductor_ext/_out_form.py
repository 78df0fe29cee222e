"""Let Inductor plan the buffer into which an opaque op writes, through the op's ``.out`` overload.

A plain fallback allocates its result itself, out of the memory plan's reach.  ``name.out(..., *,
Tensor(a!) out) -> ()`` with the arguments of ``name``, tensors first, becomes an ExternKernelOut,
as Inductor's own GEMMs are.
"""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload

from . import _compat


def has_out_form(op: OpOverload) -> bool:
    """Return whether Inductor can be given the op's ``.out``; its C++ wrapper cannot."""
    return "out" in op.overloadpacket.overloads() and not _compat.V.graph.cpp_wrapper


def call_into_planned_buffer(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Lower a call to ``op.out`` with a buffer of the size and strides that the fake says.

    Args:
        op: the functional overload, of one result.
        args, kwargs: Inductor IR, laid out as the op wants it.
    """
    ir, node = _compat.ir, _compat.V.graph.current_node
    given = _in_order(op, args, kwargs)
    tensors = [ir.ExternKernel.realize_input(a) for a in given if isinstance(a, ir.IRNode)]
    made = ir.ExternKernelOut(
        layout=ir.FallbackKernel.tensor_to_layout(node.meta["val"]),
        inputs=tensors,
        constant_args=[a for a in given if not isinstance(a, ir.IRNode)],
        python_kernel_name=f"torch.ops.{op.namespace}.{op.overloadpacket.__name__}.out",
        op_overload=op.overloadpacket.out,
    )
    return ir.TensorBox.create(made)


def _in_order(op: OpOverload, args: Any, kwargs: Any) -> list[Any]:
    """Return all arguments in the order of the schema, tensors before everything else."""
    values = []
    for place, argument in enumerate(op._schema.arguments):
        if place < len(args):
            values.append(args[place])
        else:
            values.append(kwargs.get(argument.name, argument.default_value))
    kinds = [isinstance(value, _compat.ir.IRNode) for value in values]
    if kinds != sorted(kinds, reverse=True):
        raise AssertionError(f"{op}: the schema of an op with an `.out` must begin with tensors")
    return values
