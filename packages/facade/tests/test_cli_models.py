"""Commands on models: by a factory or by their name, measured here or estimated for a platform."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from remat_facade import ForeignPlan, limit_memory, planned
from remat_facade.cli.app import main
from remat_facade.cli.target import Target
from remat_graph import load_plan

FACTORIES = """
import functools

import torch
from torch import nn

print("a line of the user")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(part for _ in range(4) for part in (nn.Conv2d(3, 3, 3), nn.Tanh())))
        self.head = nn.Linear(3, 5)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))

def net(*, weights="downloaded", weights_backbone="downloaded"):
    assert weights is weights_backbone is None
    return Net()

def on_meta():
    assert torch.empty(1).is_meta
    return Net()

class Decoder(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 256), nn.Unflatten(1, (4, 8, 8)), nn.Conv2d(4, 3, 3))

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, tokens):
        return {"logits": self.head(self.embedding(tokens)).transpose(1, 2)}

class Looking(nn.Linear):
    def __init__(self):
        super().__init__(6, 5)

    def forward(self, x):
        y = super().forward(x)
        assert y.sum().item() == y.sum().item()
        return [y[:, :0].long(), y]

class Traced(nn.Linear):
    def __init__(self):
        super().__init__(6, 5)

    def forward(self, x):
        assert type(x) is not torch.Tensor or not x.is_meta
        return super().forward(x)

class Force(nn.Linear):
    def __init__(self):
        super().__init__(6, 1)

    def forward(self, x):
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)
        return force

def fetched(pretrained):
    assert not pretrained
    return nn.Linear(6, 5)

def wide(width):
    return nn.Linear(6, width)

@functools.wraps(wide)
def wrapped():
    return wide(5)

class Broken(nn.Linear):
    def __init__(self):
        super().__init__(6, undefined)

class Config:
    vocab_size, use_cache, max_position_embeddings = 11, True, 10

class TinyLM(nn.Module):
    config_class = Config
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)
        self.position_embeddings = nn.Embedding(10, 4, padding_idx=1)

    def forward(self, input_ids, labels):
        assert not self.config.use_cache
        places = torch.arange(2, 2 + input_ids.shape[1], device=input_ids.device)
        logits = self.head(self.embedding(input_ids) + self.position_embeddings(places))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

def layers(batch):
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.Tanh()))), (
        torch.randn(batch, 64)
    )
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder with a module of factories, and its own cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "named", raising=False)
    Path("named.py").write_text(FACTORIES)


def facts(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    """The one object that a command with ``--json`` prints."""
    assert main([*words, "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize(
    ("name", "shape", "inputs", "outputs"),
    [
        ("named.net", "3x16x16", [(2, 3, 16, 16), (2,)], 1),
        ("named:Words", "6", [(2, 6), (2, 7, 6)], 1),
        ("named:Looking", "6", [(2, 6), (2,)], 1),
        ("named:Force", "6", [(2, 6)], 1),
        ("named.TinyLM", "6", [(2, 6), (2, 6)], 2),
    ],
)
def test_a_model_by_its_name_returns_its_loss(
    name: str, shape: str, inputs: list[tuple[int, ...]], outputs: int
) -> None:
    """No weights are downloaded; pictures are random numbers, and tokens are of the model's vocabulary."""
    model, args, kwargs = Target.parse(name, shape, 2).load()
    given = [*args, *kwargs.values()]
    assert inputs == [tuple(tensor.shape) for tensor in given]
    found = model(*args, **kwargs)
    loss = found if isinstance(found, torch.Tensor) else found["loss"]
    assert loss.dim() == 0
    assert outputs == (1 if isinstance(found, torch.Tensor) else len(found))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert type(model).__name__.lower() == name[6:].lower()


@pytest.mark.parametrize("name", ["named:fetched", "named:wrapped"])
def test_functions_that_need_no_more_arguments(name: str) -> None:
    """One is told to fetch no weights, the decorator of the other gives what it needs."""
    model, args, kwargs = Target.parse(name, "6", 2).load()
    assert model(*args, **kwargs).dim() == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["named.wide", "--input", "6"], "wide needs arguments: width; give a function of yours"),
        (["named.Broken", "--input", "6"], "name 'undefined' is not defined (named.py, line"),
        (["named.Broken", "--input", "6"], "): correct the code"),
        (["named.Net", "--input", "1x16x16"], "Net refuses inputs of shape (1, 1, 16, 16): RuntimeError: "),
        (["named.Net", "--input", "1x16x16"], "(named.py, line"),
        (["named.Net", "--input", "1x16x16", "--platform", "v100"], "(named.py, line"),
    ],
)
def test_what_cannot_be_built_or_called(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line says whose fault it is, and where."""
    assert main(["plan", *words, "--budget", "100%"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "shape", "loss", "target"),
    [
        ("Net", "3x16x16", F.cross_entropy, torch.zeros(2, dtype=torch.int64)),
        ("Decoder", "16", F.mse_loss, torch.zeros(2, 3, 6, 6)),
        ("Words", "6", lambda output, y: F.mse_loss(output["logits"], y), torch.zeros(2, 7, 6)),
    ],
)
def test_the_plan_of_a_named_model_is_loaded(
    name: str, shape: str, loss: Any, target: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into a model of the user's own, by the call that the command shows; no search runs."""
    words = [
        "plan",
        f"named.{name}",
        "--input",
        shape,
        "--batch",
        "2",
        "--budget",
        "100%",
        "--solver",
        "greedy",
    ]
    line = facts([*words, "--out", "plan.json"], capsys)["load"]
    said = re.search(
        r'with limit_memory\(model, "100%", loss=(.*), plan="plan.json"\); then call model\(', line
    )
    assert said
    told = eval(said[1])  # the line that a user copies
    model = getattr(sys.modules["named"], name)()
    x = (
        torch.zeros(2, 6, dtype=torch.int64)
        if name == "Words"
        else torch.randn(2, *map(int, shape.split("x")))
    )
    for each in (loss, told):
        limit_memory(model, "100%", loss=each, plan="plan.json")
        model(x, target=target).backward()
        found = planned(model)
        assert found is not None
        assert found.plan.solver == "greedy"


def test_a_plan_that_is_for_this_command_alone_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the shape of the output is unknown, or the graph is that of a GPU."""
    words = ["--input", "6", "--budget", "100%", "--platform", "v100", "--out", "plan.json"]
    assert "plan MODULE:FACTORY" in facts(["plan", "named.Traced", *words], capsys)["load"]
    assert "load it on a GPU with" in facts(["plan", "named.Words", *words], capsys)["load"]


def test_the_plan_of_a_named_model_with_its_own_loss_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    """It is called with labels."""
    words = ["plan", "named.TinyLM", "--input", "6", "--budget", "100%", "--solver", "greedy"]
    line = facts([*words, "--out", "plan.json"], capsys)["load"]
    assert 'limit_memory(model, "100%", plan="plan.json"); then call model(input_ids=..., labels=...)' in line
    named = sys.modules["named"]
    config = named.Config()
    config.use_cache = False
    model = limit_memory(named.TinyLM(config), "100%", plan="plan.json")
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    with pytest.raises(ForeignPlan):
        model(input_ids=tokens[:, 1:], labels=tokens[:, 1:])
    model(input_ids=tokens, labels=tokens)["loss"].backward()
    found = planned(model)
    assert found is not None
    assert found.plan.solver == "greedy"


@pytest.mark.parametrize("words", [["named.Decoder", "--input", "16"], ["named.py:layers", "--batch", "4"]])
def test_a_model_is_planned_in_another_type(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Its gradients take half the bytes then; integers stay as they are."""
    given = ["plan", *words, "--budget", "100%", "--solver", "noremat", "--platform", "p32xlarge"]
    half, full = (facts([*given, *more], capsys)["plan"] for more in (["--dtype", "float16"], []))
    assert 0.5 <= half["gradient_nbytes"] / full["gradient_nbytes"] < 0.6
    loaded = Target.parse("named.TinyLM", "6", 2, "bfloat16").load()
    assert {torch.bfloat16} == {parameter.dtype for parameter in loaded[0].parameters()}
    assert {torch.int64} == {tensor.dtype for tensor in loaded[2].values()}


def test_a_model_is_estimated_where_a_platform_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    """It is built without values, and its plan is for the platform and the given memory."""
    words = ["plan", "named.on_meta", "--input", "3x64x64", "--batch", "4", "--platform", "h100-spec"]
    found = facts([*words, "--budget", "auto", "--device-memory", "1GiB", "--out", "plan.json"], capsys)
    assert found["fits"] is True
    assert found["fit"]["device"] == "the given device"
    assert found["plan"]["platform"].startswith("h100-spec")
    assert found["wrote"] == ["plan.json"]
    assert found["plan"]["peak_nbytes"] == load_plan("plan.json").peak_nbytes


def test_what_does_not_fit_the_device_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    """With the budget that the device's memory leaves, whether or not anything is left of it."""
    words = ["plan", "named.on_meta", "--input", "3x64x64", "--batch", "64", "--platform", "h100-spec"]
    for memory in ("1MiB", "2KiB"):
        assert main([*words, "--budget", "auto", "--device-memory", memory]) == 1
        err = capsys.readouterr().err
        assert "remat: training does not fit: budget " in err


def test_what_does_not_fit_names_a_device_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Training fits the least memory that the error names, and not 16 KiB less."""
    words = ["plan", "named.on_meta", "--input", "3x64x64", "--batch", "64", "--platform", "h100-spec"]
    words += ["--budget", "auto", "--no-zoo", "--device-memory"]
    assert main([*words, "1MiB"]) == 1
    err = capsys.readouterr().err
    assert "raise the budget" not in err
    least = re.search(r"give --device-memory (\d+)KiB or more, or use a smaller batch", err)
    assert least
    assert main([*words, f"{least[1]}KiB"]) == 0
    assert main([*words, f"{int(least[1]) - 16}KiB"]) == 1
    capsys.readouterr()
    assert main([*words, "2KiB"]) == 1
    assert "raise --device-memory, or name an --optimizer with smaller states" in capsys.readouterr().err


def test_methods_against_each_other_on_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has a point for each budget; what the user's code prints is not on stdout."""
    words = ["sweep", "named.on_meta", "--input", "3x64x64", "--platform", "a100-spec"]
    found = facts([*words, "--solvers", "noremat,greedy", "--budgets", "100%"], capsys)
    assert found["graph_name"] == "Net"
    assert {name: len(points) for name, points in found["curves"].items()} == {"noremat": 1, "greedy": 1}
    assert found["curves"]["noremat"][0]["overhead"] == 0.0


def test_the_largest_batch_by_each_method(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a device's memory, parameters, gradients and states are not left for the step."""
    words = ["max-batch", "named.py:layers", "--solvers", "noremat,auto", "--time-limit", "1"]
    found = facts([*words, "--device-memory", "1MiB", "--platform", "flops"], capsys)
    assert 0 < found["methods"]["noremat"]["batch"] < found["methods"]["auto"]["batch"]
    assert found["budget_nbytes"] < 2**20 - 4 * 4 * 64 * 65 * 4
    assert main([*words, "--budget", "1MiB"]) == 0
    assert "noremat" in capsys.readouterr().out
    words[3] = "noremat"
    assert main([*words, "--device-memory", "1MiB", "--platform", "flops"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1.00 MiB less parameters 65.0 KiB, buffers 0 B, gradients of an earlier step 65.0 KiB" in said
    assert "kept free" in said


def test_a_doctor_looks_at_a_model_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Its object has the figures of the plan, the tables and the advice."""
    words = ["doctor", "named.on_meta", "--input", "3x64x64", "--platform", "h100-spec", "--time-limit", "1"]
    found = facts([*words, "--budget", "90%"], capsys)
    assert found["floor_nbytes"] <= found["smallest_nbytes"]
    assert found["tables"]
    assert found["plan"]["graph_name"] == "Net"


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("TinyLM", "9", "--input 9: TinyLM has positions for 8 tokens; give at most --input 8"),
        ("TinyLM", "3x8x8", "--input 3x8x8: TinyLM reads tokens; give the length of a sequence: --input 128"),
        ("Net", "8", "--input 8: Net reads images; give channels, height and width: --input 3x224x224"),
    ],
)
def test_a_shape_that_a_named_model_cannot_take(
    name: str, shape: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line says what the model reads; of ten positions, two are those of padding and before it."""
    assert main(["plan", f"named.{name}", "--input", shape, "--budget", "90%", "--platform", "flops"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"remat: named.{name}: {said}"


def test_one_number_is_a_shape_where_the_first_layer_is_linear(capsys: pytest.CaptureFixture[str]) -> None:
    """A decoder of images reads a vector."""
    words = [
        "plan",
        "named.Decoder",
        "--input",
        "16",
        "--batch",
        "2",
        "--budget",
        "100%",
        "--platform",
        "flops",
    ]
    assert main(words) == 0
