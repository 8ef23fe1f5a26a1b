"""Models of torchvision, narrowed."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from tests.helpers.models.imports import import_torchvision


def resnet18() -> nn.Module:
    import_torchvision()
    from torchvision.models.resnet import BasicBlock, ResNet

    class NarrowResNet(ResNet):
        """ResNet with a quarter of the channels, which the constructor cannot be asked for with basic blocks.

        The stem has an eighth: the gradient of its batch norm would hold half of the peak by itself.
        """

        def __init__(self, layers: list[int], num_classes: int) -> None:
            super().__init__(BasicBlock, layers)
            self.conv1 = nn.Conv2d(3, 8, kernel_size=7, stride=2, padding=3, bias=False)
            self.bn1 = nn.BatchNorm2d(8)
            self.fc = nn.Linear(128, num_classes)

        def _make_layer(
            self, block: type[Any], planes: int, blocks: int, stride: int = 1, dilate: bool = False
        ) -> nn.Sequential:
            if planes == 64:
                self.inplanes = 8
            return super()._make_layer(block, planes // 4, blocks, stride, dilate)

    return NarrowResNet([2, 2, 2, 2], num_classes=10)


def vgg16() -> nn.Module:
    import_torchvision()
    from torchvision.models.vgg import VGG, make_layers

    class NarrowVGG(VGG):
        """VGG with an eighth of the channels or fewer, without its classifier of 102 million parameters."""

        def __init__(self, channels: list[str | int], num_classes: int) -> None:
            nn.Module.__init__(self)
            self.features = make_layers(channels)
            self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
            self.classifier = nn.Sequential(
                nn.Linear(64 * 4, 64),
                nn.ReLU(inplace=True),
                nn.Dropout(),
                nn.Linear(64, 64),
                nn.ReLU(inplace=True),
                nn.Dropout(),
                nn.Linear(64, num_classes),
            )

    stages: list[str | int] = [4, 4, "M", 16, 16, "M", 32, 32, 32, "M", 64, 64, 64, "M", 64, 64, 64, "M"]
    return NarrowVGG(stages, num_classes=10)


def mobilenet_v2() -> nn.Module:
    import_torchvision()
    from torchvision.models import MobileNetV2

    return MobileNetV2(num_classes=10, width_mult=0.25)


def googlenet() -> nn.Module:
    import_torchvision()
    from torchvision.models.googlenet import BasicConv2d, GoogLeNet, Inception, InceptionAux

    class NarrowAux(InceptionAux):
        """The auxiliary head, narrowed: its first linear layer has fixed sizes."""

        def __init__(self, in_channels: int, num_classes: int, dropout: float) -> None:
            super().__init__(in_channels // 4, num_classes, dropout=dropout)
            self.conv = BasicConv2d(in_channels // 4, 16, kernel_size=1)
            self.fc1 = nn.Linear(16 * 16, 64)
            self.fc2 = nn.Linear(64, num_classes)

    def narrow_conv(in_channels: int, out_channels: int, **kwargs: Any) -> nn.Module:
        return BasicConv2d(in_channels if in_channels == 3 else in_channels // 4, out_channels // 4, **kwargs)

    def narrow_inception(*channels: int) -> nn.Module:
        return Inception(*(count // 4 for count in channels))

    model = GoogLeNet(
        num_classes=10, aux_logits=True, init_weights=False, blocks=[narrow_conv, narrow_inception, NarrowAux]
    )
    model.fc = nn.Linear(256, 10)
    return model


def densenet121() -> nn.Module:
    import_torchvision()
    from torchvision.models import DenseNet

    return DenseNet(
        growth_rate=4, block_config=(6, 12, 24, 16), num_init_features=8, drop_rate=0.1, num_classes=10
    )


def efficientnet_b0() -> nn.Module:
    import_torchvision()
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    stage = functools.partial(MBConvConfig, width_mult=0.25)
    stages = [
        stage(1, 3, 1, 32, 16, 1),
        stage(6, 3, 2, 16, 24, 2),
        stage(6, 5, 2, 24, 40, 2),
        stage(6, 3, 2, 40, 80, 3),
        stage(6, 5, 1, 80, 112, 3),
        stage(6, 5, 2, 112, 192, 4),
        stage(6, 3, 1, 192, 320, 1),
    ]
    return EfficientNet(stages, dropout=0.2, stochastic_depth_prob=0.2, num_classes=10, last_channel=128)
