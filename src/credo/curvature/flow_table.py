"""Which flow is whose: from the names of autograd's nodes to the functions of `flows`, `selections` and `products`."""

from typing import Any

from credo.curvature import flows, products, selections
from credo.curvature.flows import Flow

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
        "NativeGroupNorm",
    ],
    *_ATTENTION.split(),
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
        "NativeBatchNorm CudnnBatchNorm MiopenBatchNorm BatchNormWithUpdate NativeGroupNorm ViewAsReal ViewAsComplex",
        flows.kept,
    ),
    **_named("Unfold", flows.unfolded),
    **_named(_LOSSES, flows.lossy),
    **_named("NllLoss NllLoss2D MultiMarginLoss MultilabelMarginLoss", flows.chosen),
    **_named("CtcLoss", flows.aligned_in_time),
    **{name: flows.spatial(dims) for dims, names in _SPATIAL.items() for name in names.split()},
    **_named("Select", selections.selected),
    **_named("Slice", selections.sliced),
    **_named("Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Chunk", selections.split),
    **_named("Unbind", selections.unbound),
    **_named("Stack", selections.stacked),
    **_named("Cat", selections.joined),
    **_named("Repeat", selections.repeated),
    **_named("Index UnsafeIndex", selections.indexed),
    **_named("MaskedSelect", selections.masked),
    **_named("IndexSelect", selections.index_selected),
    **_named("Mm Mv Bmm", products.multiplied),
    **_named("Addmm Addmv Baddbmm", products.added_product),
    **_named("Dot Vdot", products.dotted),
    **_named("Linear MkldnnLinear", products.mapped),
    **_named("Convolution MkldnnConvolution CudnnConvolution SlowConv2D", products.convolved),
    **_named(_ATTENTION, products.attended),
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
