"""The tasks of the demo, with data of installed packages: a GPT-2 on text, a ResNet on digits."""

import importlib
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from remat_facade.errors import BadConfig, MissingExtra
from remat_facade.libraries import import_torchvision
from remat_graph.errors import shown

Batch = Mapping[str, Tensor]

TEXT_NBYTES = 2_000_000  # enough for the steps of a demo
VOCABULARY = 256  # each byte is a token


@attrs.frozen(kw_only=True)
class Task:
    """A model and its training data."""

    name: str  # shown to the user
    about: str  # model and data in one line
    build: Callable[[], nn.Module]  # creates the model with torch's global generator
    batches: Callable[[int], Iterator[Batch]]  # endless batches of keyword inputs for a seed
    loss: Callable[[Any], Tensor]  # extracts the loss from the output of the model
    learning_rate: float = 1e-3  # of AdamW


def get_task(name: str) -> Task:
    """The task of a name.

    Raises:
        BadConfig: the name is unknown.
        MissingExtra: a library of the task is not installed.
    """
    tasks: dict[str, Callable[[], Task]] = {"gpt2": gpt2, "resnet": resnet}
    if name not in tasks:
        raise BadConfig(field="model", problem=f"the demo trains {' or '.join(tasks)}, not {shown(name)}")
    return tasks[name]()


def gpt2(layers: int = 6, width: int = 128, batch: int = 8, length: int = 128) -> Task:
    """A small GPT-2 of Hugging Face with dropout, on the bytes of Python's standard library."""
    import_torchvision()  # transformers imports torchvision if it is installed
    transformers = _import("transformers", "the GPT-2 demo")
    text = _library_text()

    def build() -> nn.Module:
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=length,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        model: Any = transformers.GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # the default, which otherwise gives a warning
        trained: nn.Module = model.train()
        return trained

    def batches(seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(text) - length, (batch,), generator=generator)
            tokens = torch.stack([text[start : start + length] for start in starts.tolist()]).long()
            yield {"input_ids": tokens, "labels": tokens}

    return Task(
        name="gpt2",
        about=f"GPT-2, {layers} layers of {width}, dropout on, batches of {batch} x {length} bytes of Python",
        build=build,
        batches=batches,
        loss=lambda output: output.loss,
    )


def resnet(batch: int = 16, size: int = 96) -> Task:
    """ResNet-50 of torchvision on scikit-learn's handwritten digits, upsampled.

    On images this small the peak of a ResNet-18 is mostly gradients and the backward of its first layer,
    which no plan can lower; its smallest budget is 66 %.
    """
    torchvision = import_torchvision()
    if torchvision is None:
        raise MissingExtra(library="torchvision", wanted_for="the ResNet demo")
    datasets = _import("sklearn.datasets", "the ResNet demo", library="scikit-learn")
    digits = datasets.load_digits()
    small = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16 - 0.5
    labels = torch.tensor(digits.target)

    def build() -> nn.Module:
        return Classifier(torchvision.models.resnet50(num_classes=10)).train()

    def batches(seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            chosen = torch.randint(len(labels), (batch,), generator=generator)
            images = nn.functional.interpolate(small[chosen], size=(size, size), mode="bilinear")
            yield {"images": images.expand(-1, 3, -1, -1).contiguous(), "labels": labels[chosen]}

    return Task(
        name="resnet",
        about=f"ResNet-50 on handwritten digits, batches of {batch} x 3 x {size} x {size}",
        build=build,
        batches=batches,
        loss=lambda output: output,
        learning_rate=1e-4,
    )


class Classifier(nn.Module):
    """A network that returns its loss, so that the plan covers the whole step."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The cross entropy of a batch."""
        return nn.functional.cross_entropy(self.network(images), labels)


def _library_text() -> Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_NBYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def _import(module: str, wanted_for: str, library: str = "") -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(library=library or module, wanted_for=wanted_for) from error
