"""A file can say all that an `Offmate` is given beside its model, sample and budget."""

import importlib
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch.optim import SGD

from remat_facade import Offmate, from_config, generate_config
from remat_facade.entrypoints.named_optimizer import named_optimizer
from remat_facade.errors import BadConfig
from tests.helpers.offmates import MODELS, PLATFORM, Run, differences

MAKE, BATCHES = MODELS["convolutions"]

FILE = """\
type: offmate
host_budget: 20MiB
optimizer: tests.offmate.test_config:Renamed
optimizer_options: {lr: 1e-2, momentum: 0.9, weight_decay: 1e-1}
master_weights: true
weights: WEIGHTS
accumulation: 2
links: {to_host_nbytes_per_s: 1GB, to_device_nbytes_per_s: 1e9}
"""


class Renamed(SGD):
    """An optimizer of a user's own."""


def test_a_model_as_a_file_says(tmp_path):
    """Filled, optimized and planned as by the same arguments; and trained to the same bits as plainly."""
    plain = MAKE()
    save_file({**plain.state_dict()}, tmp_path / "weights.safetensors")
    path = tmp_path / "offmate.yaml"
    path.write_text(FILE.replace("WEIGHTS", str(tmp_path / "weights.safetensors")))
    with torch.device("meta"):
        empty = MAKE()
    ours = from_config(empty, BATCHES(0), "150%", path, platform=PLATFORM)
    assert isinstance(ours, Offmate)
    assert type(ours.optimizer) is Renamed
    assert not ours.optimizer_in_backward
    assert (0.01, 0.9, 0.1) == tuple(
        ours.optimizer.param_groups[0][name] for name in ("lr", "momentum", "weight_decay")
    )
    assert ours.host.capacity_nbytes == 20 << 20
    runs = [
        Run(called, optimizer, BATCHES, accumulation=2).train(3)
        for called, optimizer in (
            (plain, Renamed(plain.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1)),
            (ours, ours.optimizer),
        )
    ]
    assert [] == differences(*runs)


def test_arguments_go_before_the_file():
    """What is given is taken, and the rest as the config says."""
    config = generate_config("offmate").with_(
        optimizer="SGD", optimizer_in_backward=True, host_budget="1MiB", links={"to_host_nbytes_per_s": 1e9}
    )
    model = MAKE()
    optimizer = SGD(model.parameters(), lr=0.5)
    ours = Offmate(
        model,
        BATCHES(0),
        "150%",
        config=config,
        optimizer=optimizer,
        host_budget="2MiB",
        optimizer_in_backward=False,
        platform=PLATFORM,
    )
    assert ours.optimizer is optimizer
    assert not ours.optimizer_in_backward
    assert ours.host.capacity_nbytes == 2 << 20


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optimizer": "AdamV"}, "optimizer: wants a class of torch.optim .*, got 'AdamV'"),
        ({"optimizer": "no.such.module:Adam"}, "optimizer: names the module 'no.such.module', and a config"),
        ({"optimizer": "os:system"}, "optimizer: wants a class of torch.optim"),
        ({"optimizer": "sgd"}, "optimizer: wants a class of torch.optim"),
        ({"optimizer": "torch.nn:Linear"}, "optimizer: wants a class of torch.optim"),
        ({"optimizer": "SGD", "optimizer_options": {"lr": -1.0}}, "optimizer_options: SGD refuses"),
        ({"optimizer": "SGD", "optimizer_options": {"rate": 1.0}}, "optimizer_options: SGD refuses .*rate"),
    ],
)
def test_an_optimizer_that_there_is_not(fields, said):
    """One line that names the field."""
    config = generate_config("offmate").with_(**fields)
    with pytest.raises(BadConfig, match=said) as caught:
        from_config(MAKE(), BATCHES(0), "60%", config)
    assert "\n" not in str(caught.value)


def test_a_config_imports_nothing(tmp_path, monkeypatch):
    """A module that the program has not imported is not run, whatever it has; once imported it is taken."""
    (tmp_path / "own_optimizers.py").write_text("from torch.optim import SGD\nclass Mine(SGD):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = generate_config("offmate").with_(optimizer="own_optimizers:Mine")
    with pytest.raises(BadConfig, match="import it in your program first"):
        named_optimizer(config, MAKE())
    assert "own_optimizers" not in sys.modules
    module = importlib.import_module("own_optimizers")
    try:
        assert type(named_optimizer(config, MAKE())) is module.Mine
    finally:
        del sys.modules["own_optimizers"]


def test_an_optimizer_by_entry_point(tmp_path, monkeypatch):
    """A distribution that is installed may offer one by name, in the group `remat.optimizers`."""
    offer = tmp_path / "own-1.0.dist-info"
    offer.mkdir()
    (offer / "METADATA").write_text("Name: own\nVersion: 1.0\n")
    (offer / "entry_points.txt").write_text("[remat.optimizers]\nmine = tests.offmate.test_config:Renamed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    optimizer = named_optimizer(generate_config("offmate").with_(optimizer="mine"), MAKE())
    assert "Renamed" == type(optimizer).__name__
