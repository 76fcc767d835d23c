"""The paper's networks: exact sizes, names that stay, dropout where the paper puts it."""

import pytest
import torch
from torch import nn

from credo.errors import InvalidType, InvalidValue
from credo.models import MLP, AlexNet, LeNet5, ResNet18, xavier_normal_

SIZES = [
    (lambda: MLP((784, 100, 100, 10)), (784,), 89_610),
    (lambda: LeNet5(), (3, 32, 32), 62_006),
    (lambda: LeNet5(in_channels=1, image_size=28), (1, 28, 28), 44_426),
    (lambda: AlexNet(), (3, 32, 32), 2_472_266),
    (lambda: AlexNet(width=16), (3, 32, 32), 159_578),
    (lambda: ResNet18(), (3, 32, 32), 11_181_642),
    (lambda: ResNet18(stem="cifar"), (3, 32, 32), 11_173_962),
    (lambda: ResNet18(stem="cifar", width=16), (3, 32, 32), 701_466),
]
LAYERS = [
    (MLP((4, 3, 2)), ["layers.0", "layers.1"]),
    (LeNet5(), ["conv1", "conv2", "fc1", "fc2", "fc3"]),
    (AlexNet(width=4), ["conv1", "conv2", "conv3", "conv4", "conv5", "fc"]),
]


def with_dropout() -> list[nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # some of few outputs must be negative
        return [
            MLP((12, 9, 9, 4), dropout=0.1),
            LeNet5(dropout=0.1),
            AlexNet(width=8, dropout=0.1),
            ResNet18(width=4, dropout=0.1),
            ResNet18(width=4, stem="cifar", dropout=0.1),
        ]


WITH_DROPOUT = with_dropout()


def images(model: nn.Module, batch: int = 2) -> torch.Tensor:
    shape = (12,) if isinstance(model, MLP) else (3, 32, 32)
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))


def calls(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The leaf modules in the order in which a forward calls them, with their inputs."""
    seen: list[tuple[str, torch.Tensor]] = []
    leaves = [m for m in model.modules() if not list(m.children()) and not isinstance(m, nn.Identity)]
    handles = [
        m.register_forward_pre_hook(lambda m, x: seen.append((type(m).__name__, x[0]))) for m in leaves
    ]
    model(images(model))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(("build", "shape", "parameters"), SIZES)
def test_parameter_counts_and_output_shapes(build, shape, parameters) -> None:
    model = build()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


def test_resnet18_for_imagenet_has_the_well_known_size() -> None:
    assert sum(p.numel() for p in ResNet18(1000).parameters()) == 11_689_512


@pytest.mark.parametrize(("model", "layers"), LAYERS)
def test_names_in_the_state_dict(model: nn.Module, layers: list[str]) -> None:
    assert list(model.state_dict()) == [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]


def test_names_of_resnet_are_those_of_torchvision() -> None:
    names = list(ResNet18(width=4).state_dict())
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    block = ["conv1.weight", *(f"bn1.{n}" for n in norm), "conv2.weight", *(f"bn2.{n}" for n in norm)]
    shortcut = ["downsample.0.weight", *(f"downsample.1.{n}" for n in norm)]
    expected = ["conv1.weight", *(f"bn1.{n}" for n in norm)]
    for stage in (1, 2, 3, 4):
        expected += [f"layer{stage}.0.{n}" for n in (block if stage == 1 else block + shortcut)]
        expected += [f"layer{stage}.1.{n}" for n in block]
    assert names == [*expected, "fc.weight", "fc.bias"]


@pytest.mark.parametrize("model", WITH_DROPOUT)
def test_dropout_adds_nothing_to_the_state_dict(model: nn.Module) -> None:
    assert not any("dropout" in name for name in model.state_dict())


@pytest.mark.parametrize("model", WITH_DROPOUT)
def test_dropout_follows_every_layer_but_the_last(model: nn.Module) -> None:
    names = [name for name, _ in calls(model)]
    layers = [i for i, name in enumerate(names) if name in ("Conv2d", "Linear")]
    assert all(names[i + 1] == "Dropout" for i in layers[:-1])
    assert names[-1] == "Linear"
    assert names.count("Dropout") == len(layers) - 1


@pytest.mark.parametrize("model", WITH_DROPOUT)
def test_dropout_comes_before_the_relu_and_before_batchnorm(model: nn.Module) -> None:
    seen = calls(model)
    assert all((x < 0).any() for name, x in seen if name == "Dropout")
    names = [name for name, _ in seen]
    assert all(names[i - 1] == "Dropout" for i, name in enumerate(names) if name == "BatchNorm2d")


@pytest.mark.parametrize("model", WITH_DROPOUT)
def test_dropout_is_off_in_eval_mode_and_on_in_training(model: nn.Module) -> None:
    x = images(model, batch=8)
    model.eval()
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize("model", [LeNet5(), AlexNet(width=4), ResNet18(width=4), MLP((12, 9, 4), dropout=0)])
def test_without_a_rate_there_is_no_dropout_to_call(model: nn.Module) -> None:
    assert not any(isinstance(module, nn.Dropout) for module in model.modules())


@pytest.mark.parametrize("model", [LeNet5(), AlexNet(width=16), ResNet18(width=16), MLP((12, 200, 200, 10))])
def test_xavier_normal(model: nn.Module) -> None:
    xavier_normal_(model, generator=torch.Generator().manual_seed(0))
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) and module.weight.numel() > 2000:
            fans = sum(nn.init._calculate_fan_in_and_fan_out(module.weight))
            assert module.weight.std().item() == pytest.approx((2 / fans) ** 0.5, rel=0.08)
            assert module.bias is None or not module.bias.any()
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()


def test_xavier_normal_is_the_generators_and_leaves_the_global_one_alone() -> None:
    one, two = LeNet5(), LeNet5()
    before = torch.get_rng_state()
    for model in (one, two):
        xavier_normal_(model, generator=torch.Generator().manual_seed(3))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: LeNet5(dropout=1.0), InvalidValue, "dropout=1.0"),
        (lambda: LeNet5(dropout=float("nan")), InvalidValue, "dropout=nan"),
        (lambda: LeNet5(dropout="0.1"), InvalidType, "dropout='0.1'"),
        (lambda: LeNet5(0), InvalidValue, "num_classes=0"),
        (lambda: LeNet5(image_size=15), InvalidValue, "image_size=15"),
        (lambda: AlexNet(width=1.5), InvalidType, "width=1.5"),
        (lambda: AlexNet(True), InvalidType, "num_classes=True"),
        (lambda: ResNet18(stem="cifar10"), InvalidValue, "stem='cifar10'"),
        (lambda: MLP((784,)), InvalidValue, "sizes=(784,)"),
        (lambda: MLP((784, 0)), InvalidValue, "sizes[1]=0"),
    ],
)
def test_bad_arguments_are_named(build, error, words) -> None:
    with pytest.raises(error) as caught:
        build()
    assert words in str(caught.value)
