"""ImageNet-style training inside a memory budget, on images that are drawn at random.

    python examples/imagenet.py --arch resnet18 --budget 50%
    python examples/imagenet.py --arch resnet50 --batch-size 64 --image-size 224 --budget 4GiB

The loop is that of any script that trains a torchvision model: SGD with momentum, a step of the learning rate
each epoch, top-1 accuracy. `loss=` lets the plan cover the cross entropy, which such scripts compute outside
of the model. For real data, replace `fake_images` by `torchvision.datasets.ImageFolder`.
"""

import argparse
from collections.abc import Iterator

import torch
import torchvision
from torch import Tensor, nn

from remat_facade import limit_memory, planned


def fake_images(count: int, batch: int, size: int, classes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of float32 [batch, 3, size, size] and of their classes, int64 [batch]."""
    for _ in range(count):
        yield torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))


def accuracy(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> float:
    """The share of images whose most likely class is theirs; runs without a plan."""
    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, classes in batches:
            right += int((model(images).argmax(dim=1) == classes).sum())
            total += len(classes)
    model.train()
    return right / total


def main() -> None:
    """Train for some epochs and print losses, accuracy and the plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="resnet18", help="a model of torchvision")
    parser.add_argument("--budget", default="50%", help='bytes, "2GiB", or a share such as "50%%"')
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="batches of an epoch")
    parser.add_argument("--time-limit", type=float, help="most seconds of the search for a plan")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = torchvision.models.get_model(arguments.arch, num_classes=arguments.classes)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    limit_memory(model, arguments.budget, loss=criterion, time_limit_s=arguments.time_limit)  # the one line
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    shape = arguments.batch_size, arguments.image_size, arguments.classes

    for epoch in range(arguments.epochs):
        for step, (images, classes) in enumerate(fake_images(arguments.steps, *shape)):
            loss = model(images, target=classes)  # was criterion(model(images), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch} step {step}: loss {loss.item():.4f}")
        scheduler.step()
        print(f"epoch {epoch}: accuracy {accuracy(model, fake_images(1, *shape)):.2f}")
    print(planned(model).plan.summary())


if __name__ == "__main__":
    main()
