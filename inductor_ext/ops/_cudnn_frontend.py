"""cuDNN's FP8 attention, through the package nvidia-cudnn-frontend; imported where it is chosen.

On Hopper cuDNN writes FP8 only.  Without a scale for the result it is rounded to e4m3 in units of
V's, which no weighted mean of V's codes leaves, and cast from there; that is one rounding more than
the other ways have.  A graph is built once for each shape, layout, mask and scale.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

WEIGHT_SCALE = 256.0
"""What weights, at most 1, are multiplied by before cuDNN rounds them to e4m3."""
_ONE = [1, 1, 1, 1]


class Layout(NamedTuple):
    """What a graph depends on: shapes and strides of q, k and v, the mask, and the scale."""

    q: tuple[tuple[int, ...], tuple[int, ...]]
    k: tuple[tuple[int, ...], tuple[int, ...]]
    v: tuple[tuple[int, ...], tuple[int, ...]]
    causal: bool
    scale: float


def layout_of(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Layout:
    """Return the layout of operands."""
    shapes = [(tuple(t.shape), tuple(t.stride())) for t in (q, k, v)]
    return Layout(shapes[0], shapes[1], shapes[2], causal, scale)


def graph_of(layout: Layout, handle: Any = None) -> tuple[Any, dict[str, Any]]:
    """Return a cuDNN graph, not built yet, and its tensors by name."""
    import cudnn

    fp8, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle
    )
    named = {
        name: graph.tensor(name=name, dim=list(dim), stride=list(stride), data_type=fp8)
        for name, (dim, stride) in zip("qkv", layout[:3], strict=True)
    }
    for name in ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"):
        named[name] = graph.tensor(name=name, dim=_ONE, stride=_ONE, data_type=fp32)
    results = graph.sdpa_fp8(
        *named.values(), attn_scale=layout.scale, use_causal_mask=layout.causal,
        generate_stats=True, name="attention",
    )  # fmt: skip
    batch, heads, tokens, dim = layout.q[0]
    rows = [tokens * heads * dim, dim, heads * dim, 1]
    shapes = {
        "o": ([batch, heads, tokens, dim], rows, fp8),
        "stats": ([batch, heads, tokens, 1], [heads * tokens, tokens, 1, 1], fp32),
        "amax_s": (_ONE, _ONE, fp32),
        "amax_o": (_ONE, _ONE, fp32),
    }
    for (name, (size, stride, dtype)), tensor in zip(shapes.items(), results, strict=True):
        tensor.set_output(True).set_dim(size).set_stride(stride).set_data_type(dtype)
        named[name] = tensor
    return graph, named


@functools.cache
def _handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


@functools.lru_cache(maxsize=256)
def _built(layout: Layout, device: torch.device) -> tuple[Any, dict[str, Any], int]:
    import cudnn

    graph, named = graph_of(layout, _handle(device))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph, named, graph.get_workspace_size()


def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: tuple[Tensor, Tensor, Tensor],
    causal: bool,
    scale: float,
    out_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes of the result (B, H, S, D), in memory (B, S, H, D), and lse (B, H, S).

    Args:
        q, k, v: e4m3 codes, D innermost. scales: float32 of one element each.
        out_scale: one float32, what the result is multiplied by before it is rounded.
    """
    import cudnn

    device = q.device
    with torch.cuda.device(device):
        graph, named, bytes_needed = _built(layout_of(q, k, v, causal, scale), device)
        batch, heads, tokens, dim = q.shape
        o = q.new_empty((batch, tokens, heads, dim)).transpose(1, 2)
        floats = functools.partial(torch.empty, dtype=torch.float32, device=device)
        stats, amax_s, amax_o = floats((batch, heads, tokens, 1)), floats(1), floats(1)
        # Both in one kernel; the ends of a range are exact.
        unit, inverse = torch.linspace(WEIGHT_SCALE, 1 / WEIGHT_SCALE, 2, device=device)
        given = dict(zip(("q", "k", "v"), (q, k, v), strict=True)) | {
            "descale_q": scales[0], "descale_k": scales[1], "descale_v": scales[2],
            "descale_s": inverse, "scale_s": unit, "scale_o": out_scale,
            "o": o, "stats": stats, "amax_s": amax_s, "amax_o": amax_o,
        }  # fmt: skip
        workspace = torch.empty(bytes_needed, dtype=torch.uint8, device=device)
        handle = _handle(device)
        cudnn.set_stream(handle, torch.cuda.current_stream(device).cuda_stream)
        graph.execute({named[name]: t for name, t in given.items()}, workspace, handle=handle)
    return o, stats.squeeze(3)
