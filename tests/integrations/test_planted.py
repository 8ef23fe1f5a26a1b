"""What tools do to a model with a memory limit: the plan follows, or one warning says that it does not."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.integrations.accelerate_loops import accelerator
from benchmarks.integrations.hf_trainer import trainer_of
from benchmarks.integrations.peft_adapters import adapted
from benchmarks.integrations.scenario import Run
from benchmarks.integrations.tiny import batches, llama, tool
from benchmarks.integrations.trl_trainers import dpo, sft
from remat_executor import CaptureError, RematWarning
from remat_facade import BadModel, limit_memory, planned
from remat_graph import BadBudget, Roofline

pytestmark = pytest.mark.usefixtures("only_our_warnings_count")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """What the scenarios' trainers need."""
    return Run(planned=True, folder=tmp_path, cache=tmp_path)


def pair(run: Run) -> tuple[Any, Any]:
    """The same model twice, the second with a limit."""
    torch.manual_seed(0)
    model = llama(attention_dropout=0.0).train()
    return model, limit_memory(copy.deepcopy(model), "60%", **run.line)


def loss_of(call: Any, step: int = 0) -> Tensor:
    """A forward and a backward."""
    result = call(**batches(step + 1)[step])
    loss: Tensor = result["loss"] if isinstance(result, dict) else result
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> list[Tensor]:
    """Of all parameters."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_equal_gradients(one: nn.Module, other: nn.Module) -> None:
    """To the bit."""
    pairs = list(zip(gradients(one), gradients(other), strict=True))
    assert pairs
    assert all(torch.equal(a, b) for a, b in pairs)


class Wrapper(nn.Module):
    """As DDP and FSDP have it: the model at `module`, and its `forward` called by itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Tensor) -> Any:
        """Past the hooks of the model."""
        return self.module.forward(**inputs)


def test_a_wrapper_calls_the_forward_alone(run: Run) -> None:
    """The plan is in `forward`, not in `__call__`."""
    plain, ours = pair(run)
    assert torch.equal(loss_of(Wrapper(plain)), loss_of(Wrapper(ours)))
    assert_equal_gradients(plain, ours)
    assert planned(ours).runs == {"planned": 1}


def test_forward_replaced_after_planning(run: Run) -> None:
    """Twice: by a function around it, and back, as mixed precision does."""
    plain, ours = pair(run)
    loss_of(plain), loss_of(ours)
    for model in (plain, ours):
        before = model.forward
        model.forward = lambda before=before, **inputs: 2 * before(**inputs).loss
    with pytest.warns(RematWarning, match="planning again"):
        loss = loss_of(ours)
    assert torch.equal(loss, loss_of(plain))
    for model in (plain, ours):
        del model.forward
        loss_of(model)
    assert_equal_gradients(plain, ours)
    assert planned(ours).runs == {"planned": 3, "replanned": 1}


def test_a_copy_made_after_planning(run: Run) -> None:
    """It runs by the plan of the model, on its own weights."""
    plain, ours = pair(run)
    loss_of(ours)
    copied = copy.deepcopy(ours)
    copied.zero_grad()
    assert torch.equal(loss_of(plain), loss_of(copied))
    assert_equal_gradients(plain, copied)
    assert planned(copied).runs == {"planned": 1}
    assert planned(ours).runs == {"planned": 1}


def test_accelerate_gives_the_forward_back(run: Run) -> None:
    """`unwrap_model` takes mixed precision away from a model that is planned."""
    plain, ours = pair(run)
    with accelerator(mixed_precision="bf16") as speed:
        for model in (plain, ours):
            prepared = speed.prepare_model(model)
            loss_of(prepared)
            model.zero_grad()
            speed.unwrap_model(prepared, keep_fp32_wrapper=False)
    loss = loss_of(plain)
    with pytest.warns(RematWarning, match="planning again"):
        assert torch.equal(loss, loss_of(ours))
    assert_equal_gradients(plain, ours)
    assert planned(ours).runs == {"planned": 2, "replanned": 1}


def test_adapters_put_into_a_model_that_is_planned(run: Run) -> None:
    """PEFT replaces its layers."""
    plain, ours = pair(run)
    loss_of(plain), loss_of(ours)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*planning again", RematWarning)
        found = []
        for model in (plain, ours):
            torch.manual_seed(1)
            found.append(adapted(model).train())
            torch.manual_seed(2)
            loss_of(found[-1])
    assert_equal_gradients(*found)
    assert planned(ours).runs == {"planned": 2, "replanned": 1}


@pytest.mark.full  # the other trainers' cases run in the CI cut
def test_dpo_puts_adapters_into_a_limited_model(run: Run) -> None:
    """It makes another model of what it was given: the plan follows."""
    config = tool("peft").LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM")
    losses, models = [], []
    for limited in (False, True):
        torch.manual_seed(0)
        models.append(llama())
        if limited:
            limit_memory(models[-1], "60%", reserve_nbytes=128 << 10, **run.line)
        trainer = dpo(run, models[-1], max_steps=2, trainer={"peft_config": config})
        torch.manual_seed(1)
        trainer.train()
        losses.append([each["loss"] for each in trainer.state.log_history if "loss" in each])
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]
    assert planned(models[1]).runs["planned"] == 2


def test_a_compiled_model_warns(run: Run) -> None:
    """A plan runs as it is, whatever the compiler."""
    plain, ours = pair(run)
    with pytest.warns(RematWarning, match="torch.compile changes nothing"):
        loss = loss_of(torch.compile(ours, backend="eager"))
    assert torch.equal(loss, loss_of(plain))
    assert planned(ours).runs["planned"] == 1


def parts_only(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """A loss from the parts of a model, past the model."""
    inputs = dict(inputs)
    labels = inputs.pop("labels")
    logits = model.lm_head(model.model(**inputs).last_hidden_state)
    loss: Tensor = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss


def test_a_trainer_that_calls_the_parts_alone_warns(run: Run) -> None:
    """Of transformers: nothing can be planned, and the callback says so after the first step, once."""
    base_class: Any = tool("transformers").Trainer
    callbacks = run.callbacks("transformers", llama())

    class Parts(base_class):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Tensor:
            return parts_only(model, inputs)

    base = trainer_of(run, llama(), max_steps=2)
    trainer = Parts(model=llama(), args=base.args, train_dataset=base.train_dataset, callbacks=callbacks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RematWarning)
        trainer.train()
    ours = [str(each.message) for each in caught if issubclass(each.category, RematWarning)]
    assert len(ours) == 1
    assert "was not called" in ours[0]


def test_a_lightning_module_that_calls_the_parts_alone_warns(run: Run) -> None:
    """Of Lightning: the same."""
    lightning = pytest.importorskip("lightning", reason="lightning is in the environment `integrations` only")
    model = llama()
    base_class: Any = lightning.LightningModule

    class Parts(base_class):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Tensor:
            return parts_only(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, callbacks=run.callbacks("lightning", model),
    )  # fmt: skip
    loader: Any = torch.utils.data.DataLoader(batches(2), batch_size=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RematWarning)
        trainer.fit(Parts(), loader)
    ours = [str(each.message) for each in caught if issubclass(each.category, RematWarning)]
    assert len(ours) == 1
    assert "was not called" in ours[0]


def test_lightning_asks_for_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trainer has it where the environment has a budget, and no other trainer."""
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is in the environment `integrations` only")
    tool("lightning")
    from remat_facade.integrations.lightning import MemoryLimit, callbacks_of_environment

    monkeypatch.delenv("REMAT_BUDGET", raising=False)
    assert callbacks_of_environment() == []
    monkeypatch.setenv("REMAT_BUDGET", "2GiB")
    (callback,) = callbacks_of_environment()
    assert isinstance(callback, MemoryLimit)


@pytest.mark.parametrize("by", ["nothing", "a callback", "limit_memory", "limit_memory of the whole"])
def test_lightning_keeps_the_limit_of_the_script(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's budget is for what has none; Lightning itself adds the callback."""
    lightning = pytest.importorskip("lightning", reason="lightning is in the environment `integrations` only")
    from remat_facade.integrations.lightning import MemoryLimit

    monkeypatch.setenv("REMAT_BUDGET", "900MiB")
    base_class: Any = lightning.LightningModule

    class Training(base_class):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def forward(self, **batch: Any) -> Any:
            return self.model(**batch)

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    module, callbacks = Training(), []
    if by == "a callback":
        callbacks.append(MemoryLimit("800MiB", platform=Roofline()))
    elif by != "nothing":
        limit_memory(module if "whole" in by else module.model, "800MiB", platform=Roofline())
    for _ in range(2):  # also in another fit
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False,
            enable_checkpointing=False, enable_model_summary=False, callbacks=callbacks,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(batches(1), batch_size=None))
    found = planned(module)
    assert found is not None
    assert found.plan.budget_nbytes == (900 if by == "nothing" else 800) * 2**20


def test_a_lightning_module_that_cannot_be_limited_as_it_is_given(run: Run) -> None:
    """One without a forward, where a limit would never be looked at; a module that it does not have."""
    lightning = pytest.importorskip("lightning", reason="lightning is in the environment `integrations` only")
    from remat_facade.integrations.lightning import MemoryLimit

    base_class: Any = lightning.LightningModule

    class Inside(base_class):
        def __init__(self) -> None:
            super().__init__()
            self.net = llama()

    class Forward(Inside):
        def forward(self, ids: Tensor) -> Tensor:
            return self.net(ids)[0]

    with pytest.raises(BadModel, match=r"a Inside has no forward, .* that training calls \(net\)"):
        limit_memory(Inside(), "60%")
    limit_memory(Forward(), "60%")
    with pytest.raises(BadModel, match=r"Inside has no submodule 'model': name one of its modules \(net\)"):
        MemoryLimit("60%", module="model").on_fit_start(None, Inside())
    two, frozen = Inside(), Inside()
    two.weight = nn.Parameter(torch.ones(1))
    with pytest.raises(BadModel, match=r'trains net, parameters of its own: .*, module="net"\)'):
        MemoryLimit("60%").on_fit_start(None, two)
    del two.net
    with pytest.raises(BadModel, match=r"parameters of its own only: limit it with limit_memory\(module"):
        MemoryLimit("60%").on_fit_start(None, two)
    with pytest.raises(BadModel, match="no parameter of Inside requires a gradient"):
        MemoryLimit("60%").on_fit_start(None, frozen.requires_grad_(False))
    with pytest.raises(BadBudget, match="has no unit"):
        MemoryLimit("60")
    with pytest.raises(TypeError, match=r"MemoryLimit\(\) got an unexpected keyword argument 'modul'"):
        MemoryLimit("60%", modul="net")  # type: ignore[call-arg]


def test_the_body_is_limited_where_trl_selects_tokens_by_labels(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TRL's fused head does on a GPU: the whole model is no graph, and the error says what to limit."""
    from remat_facade.integrations.transformers import RematCallback

    monkeypatch.setattr(tool("trl.trainer.utils"), "_use_triton", lambda device: True)
    losses = []
    for callbacks in ([], [RematCallback("60%", module="model", **run.line)]):
        torch.manual_seed(0)
        trainer = sft(run, llama(), trainer={"callbacks": callbacks}, max_steps=2)
        trainer.train()
        losses.append([(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e])
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]
    found = planned(trainer.model)
    assert found is not None
    assert (found.runs["planned"], found.plan.peak_nbytes <= found.plan.budget_nbytes) == (2, True)
    refused = sft(run, llama(), trainer={"callbacks": [RematCallback("60%", **run.line)]})
    with pytest.raises(CaptureError, match=r"values of a tensor .*limit_memory\(model\.part, budget\)"):
        refused.train()
    with pytest.raises(BadModel, match=r"no submodule 'body': name one of its modules \(model, lm_head\)"):
        sft(run, llama(), trainer={"callbacks": [RematCallback("60%", module="body", **run.line)]}).train()
