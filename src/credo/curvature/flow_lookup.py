"""How examples flow through a node: by its name, with a function of `curvature.flows`, or else examined by numbers."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from credo.curvature import flows
from credo.curvature.flows import DIFFERENT, Flow, Graph, Layouts, Mixed
from credo.curvature.layouts import Layout, Rows, Single, WholeBatch
from credo.curvature.rules import Generic
from credo.curvature.torch_private import results_of

_ELEMENTWISE_NAMES = """
Abs Acos Acosh Alias Angle Asin Asinh Atan Atan2 Atanh Bernoulli Ceil Celu Clamp ClampMax ClampMin Clone Complex Conj
ConjPhysical Copysign Cos Cosh Deg2Rad Digamma Elu Erf Erfc Erfinv Exp Exp2 Expm1 Fill Floor Fmax Fmin Fmod Frac
FusedDropout Gelu Hardshrink Hardsigmoid Hardswish Hardtanh Hypot I0 Ldexp LeakyRelu Lerp Lgamma LiftFresh Log Log10
Log1P Log2 LogSigmoid Logaddexp Logaddexp2 Logit MaskedFill Maximum Minimum Mish Mul Div NanToNum NativeDropout Neg
NegView Polar Polygamma Pow PreluKernel Rad2Deg Reciprocal Relu Remainder Round RreluWithNoise Rsqrt Sgn Sigmoid Sign
Silu Sin Sinc Sinh Softplus Softshrink SpecialEntr SpecialErfcx SpecialI0E SpecialI1 SpecialI1E SpecialLogNdtr
SpecialNdtri SpecialXlog1Py Sqrt Tan Tanh Threshold ToCopy Tril Triu Trunc Where Xlogy Zero Addcmul Addcdiv Expand
"""
ELEMENTWISE = (*_ELEMENTWISE_NAMES.split(), "Add", "Sub", "Rsub")
_ALONG = """
Softmax LogSoftmax SafeSoftmax Cumsum Cumprod Cummax Cummin Logcumsumexp Flip Roll Glu FftC2C FftR2C FftC2R
"""
_PICKED = """
Gather Scatter ScatterAdd ScatterReduce IndexAdd IndexFill IndexCopy IndexReduce Sort Topk
"""
_REDUCED = """
Sum Mean Var Std VarMean StdMean Amax Amin Nansum Prod Max Min Median Nanmedian Kthvalue Mode Logsumexp Norm
LinalgVectorNorm Aminmax
"""
_ATTENTION = """
ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention ScaledDotProductEfficientAttention
ScaledDotProductCudnnAttention ScaledDotProductFusedAttentionOverrideable
"""
_LOSSES = "MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits SoftMarginLoss"
_SPATIAL = {
    1: "ReflectionPad1D ReplicationPad1D UpsampleLinear1D UpsampleNearest1D UpsampleNearestExact1D",
    2: """MaxPool2DWithIndices MaxPool2D AvgPool2D AdaptiveAvgPool2D AdaptiveMaxPool2D MkldnnMaxPool2D
    MkldnnAdaptiveAvgPool2D FractionalMaxPool2D ReflectionPad2D ReplicationPad2D UpsampleNearest2D UpsampleBilinear2D
    UpsampleBicubic2D UpsampleNearestExact2D UpsampleBilinear2DAa UpsampleBicubic2DAa MaxUnpool2D""",
    3: """MaxPool3DWithIndices AvgPool3D AdaptiveAvgPool3D AdaptiveMaxPool3D MkldnnMaxPool3D FractionalMaxPool3D
    ReflectionPad3D ReplicationPad3D UpsampleNearest3D UpsampleTrilinear3D UpsampleNearestExact3D MaxUnpool3D
    PixelShuffle PixelUnshuffle ChannelShuffle""",
}

SHAPES_ALONE = (  # whose flow depends on the shapes and nothing else
    *[
        "View",
        "UnsafeView",
        "ReshapeAlias",
        "Mm",
        "Mv",
        "Bmm",
        "Addmm",
        "Addmv",
        "Baddbmm",
        "NativeBatchNorm",
    ],
    *_ATTENTION.split(),
    "RegisterPost",
    "RegisterPre",
    *(name for names in _SPATIAL.values() for name in names.split()),
)


def _named(names: str, flow: Flow) -> dict[str, Flow]:
    return dict.fromkeys(names.split(), flow)


_FLOWS: dict[str, Flow] = {
    **dict.fromkeys(ELEMENTWISE, flows.same),
    **_named("Add Sub Rsub", flows.added),
    **_named("View UnsafeView ReshapeAlias MkldnnReshape", flows.reshaped),
    **_named("Permute", flows.permuted),
    **_named("Transpose T", flows.transposed),
    **_named(_ALONG, flows.along),
    **_named(_PICKED, flows.picked_along),
    **_named(_REDUCED, flows.reduced),
    **_named("Unsqueeze", flows.unsqueezed),
    **_named("Squeeze", flows.squeezed),
    **_named("NativeLayerNorm FusedRmsNorm", flows.normalised),
    **_named(
        "NativeBatchNorm CudnnBatchNorm MiopenBatchNorm BatchNormWithUpdate ViewAsReal ViewAsComplex",
        flows.kept,
    ),
    **_named("NativeGroupNorm", flows.normalised_in_groups),
    **_named("Unfold", flows.unfolded),
    **_named(_LOSSES, flows.lossy),
    **_named("NllLoss NllLoss2D MultiMarginLoss MultilabelMarginLoss", flows.chosen),
    **_named("CtcLoss", flows.aligned_in_time),
    **{name: flows.spatial(dims) for dims, names in _SPATIAL.items() for name in names.split()},
    **_named("Select", flows.selected),
    **_named("Slice", flows.sliced),
    **_named("Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Chunk", flows.split),
    **_named("Unbind", flows.unbound),
    **_named("Stack", flows.stacked),
    **_named("Cat", flows.joined),
    **_named("Repeat", flows.repeated),
    **_named("Index UnsafeIndex", flows.indexed),
    **_named("MaskedSelect", flows.masked),
    **_named("IndexSelect", flows.index_selected),
    **_named("Mm Mv Bmm", flows.multiplied),
    **_named("Addmm Addmv Baddbmm", flows.added_product),
    **_named("Dot Vdot", flows.dotted),
    **_named("Linear MkldnnLinear", flows.mapped),
    **_named("Convolution MkldnnConvolution CudnnConvolution SlowConv2D", flows.convolved),
    **_named(_ATTENTION, flows.attended),
    "RegisterPost": flows.each,  # what FSDP2 puts before a module and after it
    "RegisterPre": flows.each,
}


def flow_of(kind: Any) -> Flow | None:
    """Of a type of nodes; None if it has to be examined."""
    return _FLOWS.get(operation_name(kind))


def operation_name(kind: Any) -> str:
    """AddmmBackward0 → Addmm."""
    known = _names.get(kind)
    if known is None:
        name: str = kind.__name__
        known = name.partition("Backward")[0] if name.rstrip("0123456789").endswith("Backward") else name
        _names[kind] = known
    return known


_names: dict[Any, str] = {}


# ────────────────────────────────────────
# Examines by numbers whether an operation keeps the examples apart, where its name does not say so.
#
# A node of autograd's graph is a linear map, from gradients of its results to gradients of its arguments. It keeps the
# examples apart if gradients of some rows alone come back to the same rows alone. Rows are told from each other by
# the bits of their numbers: for each bit, those that have it and those that do not, so that any two are apart in one
# of them.

Places = list[tuple[int, Rows | Single]]


def probed(graph: Graph, node: Any, layouts: Layouts) -> list[Layout] | Layout:
    """The layouts of the results, as the node's own gradients tell; raises `Mixed` where none fits."""
    places: Places = [(k, layout) for k, layout in enumerate(layouts) if isinstance(layout, (Rows, Single))]
    if not places:
        return next((k for k in layouts if isinstance(k, WholeBatch)), None)
    labels = {layout.label for _, layout in places if isinstance(layout, Rows)}
    singles = {layout for _, layout in places if isinstance(layout, Single)}
    if len(labels) > 1 or (singles and labels - {None}):
        raise Mixed(DIFFERENT)
    return [_layout_of(graph, node, own, places) for own in range(len(results_of(node)))]


def _layout_of(graph: Graph, node: Any, own: int, places: Places) -> Layout:
    if not _has_gradient(node, own):
        return None
    known = next((k for _, k in places if isinstance(k, Rows)), Rows(0, 1, graph.examples, 1))
    for candidate in _candidates(graph.result(node, own), known):
        if all(_kept_apart(graph, node, own, candidate, places, mask) for mask in _masks(candidate.rows)):
            return candidate
    alone = {layout for _, layout in places}
    if len(alone) == 1 and isinstance(places[0][1], Single):
        return places[0][1]
    raise Mixed("lets rows of different examples meet")


def _has_gradient(node: Any, own: int) -> bool:
    """Results of whole numbers, such as the places of maxima, have none."""
    dtype = getattr(results_of(node)[own], "dtype", torch.float32)
    return bool(dtype.is_floating_point or dtype.is_complex)


def _candidates(shape: Sequence[int], known: Rows) -> Iterator[Rows]:
    """Where the examples may be in the result: first where they have been in the argument."""
    axes = sorted(range(len(shape)), key=lambda axis: axis != known.axis)
    for axis in axes:
        merged, rest = divmod(shape[axis], known.rows)
        if rest or not merged:
            continue
        yield Rows(axis, 1, known.rows, merged, known.label if merged == 1 else None)
        if merged > 1:
            yield Rows(axis, merged, known.rows, 1)


def _masks(rows: int) -> Iterator[Tensor]:
    numbers = torch.arange(rows)
    for bit in range(max(rows - 1, 1).bit_length()):
        has = (numbers >> bit) % 2 == 1
        yield has
        yield ~has


def _kept_apart(graph: Graph, node: Any, own: int, layout: Rows, places: Places, mask: Tensor) -> bool:
    meta, shape = results_of(node), torch.Size(graph.result(node, own))
    grads = [_zeros(graph.result(node, k), m) if _has_gradient(node, k) else None for k, m in enumerate(meta)]
    grads[own] = _masked(_wave(shape), layout, mask).to(meta[own].dtype).to(meta[own].device)
    back = _gradients(node, grads)
    return not any(_comes_elsewhere(back[k], argument, mask) for k, argument in places if k < len(back))


def _comes_elsewhere(sent: Tensor | None, argument: Rows | Single, mask: Tensor) -> bool:
    """Whether something comes back to rows that nothing was sent from."""
    if sent is None:
        return False
    if isinstance(argument, Single):
        return not bool(mask[argument.example]) and bool(sent.any())
    return bool(_masked(sent, argument, ~mask).any())


def keeps_apart(operation: Generic, layouts: Layouts, results: Layouts) -> bool:
    """Whether an operation without a rule does, which runs in a graph of its own."""
    places = [
        (k, layout) for k, layout in enumerate(layouts) if isinstance(layout, Rows) and layout.label is None
    ]
    own = [operation._own[k] for k, _ in places]
    pairs = [
        (out, layout)
        for out, layout in zip(operation._outputs, results, strict=True)
        if isinstance(layout, Rows) and out.requires_grad
    ]
    for mask in _masks(pairs[0][1].rows) if own and pairs else ():
        sent = [_masked(_wave(out.shape).to(out), layout, mask) for out, layout in pairs]
        back = torch.autograd.grad([o for o, _ in pairs], own, sent, retain_graph=True, allow_unused=True)
        if any(_comes_elsewhere(grad, layout, mask) for grad, (_, layout) in zip(back, places, strict=True)):
            return False
    return True


def _wave(shape: Sequence[int]) -> Tensor:
    """Numbers that do not cancel each other."""
    count = torch.Size(shape).numel()
    wave = torch.arange(1, count + 1, dtype=torch.float64).mul_(0.7548776662).cos_().add_(1.5)
    return wave.view(tuple(shape))


def _gradients(node: Any, grads: list[Tensor | None]) -> Sequence[Tensor | None]:
    try:
        with torch.no_grad():
            back = node.apply(*grads) if hasattr(node, "saved_tensors") else node(*grads)
    except Exception as error:
        raise Mixed(f"could not be examined ({type(error).__name__}: {error})") from error
    return back if isinstance(back, tuple) else (back,)


def _zeros(shape: Sequence[int], meta: Any) -> Tensor:
    return torch.zeros(tuple(shape), dtype=meta.dtype, device=meta.device)


def _masked(tensor: Tensor, layout: Rows, mask: Tensor) -> Tensor:
    """The tensor with zeros in the rows that the mask does not have."""
    spread = mask.to(tensor.device).repeat_interleave(layout.inner).repeat(layout.outer)
    return tensor * spread.view(-1, *[1] * (tensor.dim() - 1 - layout.axis))
