"""What trainers do beside steps, with the real packages: a planned model is the user's model in all of it."""

from __future__ import annotations

import copy
import inspect
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor import BadInput, MemoryMeter, PlannedModule, RematWarning
from tests.helpers.models import import_transformers
from tests.helpers.planners import repeat_at_random
from tests.helpers.small_llama import WORDS, small_llama
from tests.helpers.trainers import QUIET, history


@pytest.fixture(autouse=True)
def only_our_warnings_count() -> Iterator[None]:
    """What these programs warn of among themselves is theirs; that a call is planned anew is expected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", RematWarning)
        warnings.filterwarnings("ignore", ".*planning again", RematWarning)
        yield


def llama(tied: bool = False, adapters: bool = False) -> nn.Module:
    """A small one; `tied` shares words with the head, `adapters` are PEFT's."""
    model = small_llama(tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if adapters:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM"))
    return model


def sentence(seed: int) -> dict[str, Tensor]:
    """A sentence, and what comes next in it."""
    ids = torch.randint(3, WORDS, (16,), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sixteen of them."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        """One, without a batch dimension."""
        return sentence(place)


def planned(model: nn.Module, cache: Path) -> PlannedModule:
    """With repeats here and there."""
    batch = {name: torch.stack([tensor, tensor]) for name, tensor in sentence(0).items()}
    return PlannedModule(model, (), batch, repeat_at_random(12), cache_dir=cache)


def train(model: nn.Module, folder: Path, **options: Any) -> Any:
    """Six steps by transformers' trainer."""
    transformers = import_transformers()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_eval_batch_size=2,
        max_steps=6,
        learning_rate=1e-2,
        **QUIET,
        **options,
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Sentences(), eval_dataset=Sentences()
    )
    trainer.train()
    return trainer


def test_a_planned_model_is_of_its_models_class(tmp_path: Path) -> None:
    """Of ours too; its name, its signature and that of its class are the original's."""
    original, ours = llama(), planned(llama(), tmp_path)
    assert isinstance(ours, type(original))
    assert isinstance(ours, PlannedModule)
    assert ours._get_name() == original._get_name()
    assert inspect.signature(type(ours).forward) == inspect.signature(type(original).forward)
    assert inspect.signature(ours.forward) == inspect.signature(original.forward)


@pytest.mark.parametrize("adapters", [False, True])
def test_label_smoothing_has_the_originals_objective(adapters: bool, tmp_path: Path) -> None:
    """The trainer shifts labels by the name of the model's class."""
    options: dict[str, Any] = {"label_smoothing_factor": 0.1, "save_strategy": "no"}
    expected = history(train(llama(adapters=adapters), tmp_path / "original", **options))
    ours = planned(llama(adapters=adapters), tmp_path)
    assert expected == history(train(ours, tmp_path / "planned", **options))
    assert ours.runs["planned"] == 6
    assert ours.runs["original"] == 0


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_best_model_is_evaluated_saved_and_loaded(tied: bool, adapters: bool, tmp_path: Path) -> None:
    """Labels are found in the class's signature; a checkpoint is one of the original's class."""
    transformers = import_transformers()
    options: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 3,
        "load_best_model_at_end": True,
    }
    original, ours = llama(tied, adapters), planned(llama(tied, adapters), tmp_path)
    expected = history(train(original, tmp_path / "original", **options))
    assert expected == history(train(ours, tmp_path / "planned", **options))
    assert sum("eval_loss" in entry for entry in expected) == 2
    assert ours.runs["planned"] == 6
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name

    files = [
        sorted(file.name for file in (tmp_path / whose / "checkpoint-6").iterdir() if file.suffix != ".pth")
        for whose in ("original", "planned")
    ]
    assert files[0] == files[1]
    folder = tmp_path / "planned" / "checkpoint-6"
    if adapters:
        peft = pytest.importorskip("peft")
        loaded = peft.PeftModel.from_pretrained(llama(tied), folder)
        assert "adapter_config.json" in files[1]
    else:
        loaded = transformers.LlamaForCausalLM.from_pretrained(folder)
        saved = json.loads((folder / "config.json").read_text())
        assert saved["architectures"] == ["LlamaForCausalLM"]
    batch = {name: tensor[None] for name, tensor in sentence(3).items()}
    with torch.no_grad():
        assert torch.equal(original.eval()(**batch).logits, loaded.eval()(**batch).logits)


def test_what_a_trainer_assigns_to_forward_is_planned(tmp_path: Path) -> None:
    """TRL's trainer puts a forward of its own, which never calls the model's, in its place."""
    import_transformers()
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(
        [{"input_ids": sentence(i)["input_ids"].tolist()} for i in range(len(Sentences()))]
    )

    def losses(model: nn.Module, folder: Path) -> list[dict[str, float]]:
        arguments = trl.SFTConfig(
            output_dir=str(folder),
            max_steps=4,
            learning_rate=1e-2,
            save_strategy="no",
            gradient_checkpointing=False,
            bf16=False,
            **QUIET,
        )
        trainer = trl.SFTTrainer(
            model=model, args=arguments, train_dataset=data, processing_class=tokenizer()
        )
        trainer.train()
        return history(trainer)

    ours = planned(llama(), tmp_path)
    assert losses(llama(), tmp_path / "original") == losses(ours, tmp_path / "planned")
    assert ours.runs["planned"] == 4
    assert ours.runs["original"] == 0


def tokenizer() -> Any:
    """Its words are numbers."""
    transformers = import_transformers()
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {str(number): number for number in range(WORDS)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="3"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="0", bos_token="1", eos_token="2"
    )


def test_a_forward_that_is_assigned_is_planned(tmp_path: Path) -> None:
    """Whether it calls the one before or not; taken away, the original's is planned again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    ours = PlannedModule(model, (x,), {}, repeat_at_random(3), cache_dir=tmp_path)
    expected = model(x)
    before = ours.forward
    ours.forward = lambda x: 2 * before(x)
    assert torch.equal(2 * expected, ours(x))
    ours.forward = model[0].forward
    assert torch.equal(model[0](x), ours(x))
    del ours.forward
    assert torch.equal(expected, ours(x))
    assert ours.runs == {"planned": 3, "replanned": 2}


def test_a_forward_made_anew_at_each_step_is_planned_once(tmp_path: Path) -> None:
    """As long as its code is the same and what it holds."""
    x = torch.randn(4, 8)
    ours = PlannedModule(nn.Linear(8, 8), (x,), {}, repeat_at_random(1), cache_dir=tmp_path)
    for _ in range(3):
        factor, before = 3, ours.module.forward
        ours.forward = lambda x: factor * before(x)  # noqa: B023
        ours(x).sum().backward()
    assert ours.runs == {"planned": 3, "replanned": 1}


def test_a_forward_that_cannot_be_captured_runs_around_the_plan(tmp_path: Path) -> None:
    """It lies outside of the budget, which is said; one that never calls the plan is said to have none."""
    x = torch.randn(4, 8)
    ours = PlannedModule(nn.Linear(8, 8), (x,), {}, repeat_at_random(1), cache_dir=tmp_path)
    before = ours.forward
    ours.forward = lambda x: before(x) if bool(x.sum() < 1e9) else x
    with pytest.warns(RematWarning, match="lies outside of the plan"):
        assert torch.equal(ours.module(x), ours(x))
    assert torch.equal(ours.module(x), ours(x))
    assert ours.runs == {"planned": 2}
    weight = ours.weight
    ours.forward = lambda x: x @ weight if bool(x.sum() < 1e9) else x
    with pytest.warns(RematWarning, match="what was assigned to its forward cannot be captured"):
        assert torch.equal(x @ weight, ours(x))
    assert ours.runs == {"planned": 2, "original": 1}


def test_the_originals_forward_may_be_the_planned_one(tmp_path: Path) -> None:
    """`model.forward = planned.forward`, or something around it: calling the model is calling the plan."""
    x = torch.randn(4, 8)
    model = nn.Linear(8, 8)
    expected = model(x)
    ours = PlannedModule(model, (x,), {}, repeat_at_random(1), cache_dir=tmp_path)
    model.forward = ours.forward
    for module in (model, ours):
        assert torch.equal(expected, module(x))
    assert ours.runs["planned"] == 2
    before = ours.forward
    model.forward = lambda x: 2 * before(x)
    for module in (model, ours):
        assert torch.equal(2 * expected, module(x))
    assert ours.runs["planned"] == 4


def test_a_container_is_changed_counted_and_cut_as_the_original(tmp_path: Path) -> None:
    """Both are one container; what is put into one is in the other, and the next call runs it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    ours = PlannedModule(model, (x,), {}, repeat_at_random(3), cache_dir=tmp_path)
    layer = nn.ReLU()
    ours[1] = layer
    assert model[1] is layer
    assert len(ours) == 3
    assert [*ours] == [*model]
    assert type(ours[:2]) is nn.Sequential
    ours.append(nn.Linear(8, 4))
    assert torch.equal(model(x), ours(x))
    assert ours.runs == {"planned": 1, "replanned": 1}


def test_a_container_that_takes_no_subclass_is_a_container_still(tmp_path: Path) -> None:
    """It is said, and indexing, length and loops are the original's."""

    class Final(nn.Sequential):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            raise TypeError("nobody is a Final beside me")

    torch.manual_seed(0)
    model = Final(nn.Linear(8, 8), nn.GELU())
    x = torch.randn(4, 8)
    with pytest.warns(RematWarning, match="is no Final: .*nobody is a Final beside me"):
        ours = PlannedModule(model, (x,), {}, repeat_at_random(3), cache_dir=tmp_path)
    layer = nn.ReLU()
    ours[1] = layer
    assert ours[1] is layer
    assert len(ours) == 2
    assert [*ours] == [*model]
    assert isinstance(ours, PlannedModule)
    assert torch.equal(model(x), ours(x))


def test_attributes_are_one_set(tmp_path: Path) -> None:
    """An attribute of an instance wins over its class's, whoever set it, on both."""

    class Model(nn.Linear):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    x = torch.randn(4, 8)
    model = Model(8, 8)
    model.scale = 2.0
    ours = PlannedModule(model, (x,), {}, repeat_at_random(1), cache_dir=tmp_path)
    assert ours.scale == 2.0
    ours.scale = 3.0
    assert model.scale == 3.0
    assert torch.equal(nn.Linear.forward(model, x) * 3.0, ours(x))
    del model.scale
    assert ours.scale == 1.0


def test_private_names_of_planned_modules_are_marked() -> None:
    """Methods of the original's class find their own attributes on the planned module, not ours."""
    facade = pytest.importorskip("remat_facade")
    kinds = {
        kind
        for name in facade.__all__
        if isinstance(entry := getattr(facade, name), type) and issubclass(entry, PlannedModule)
        for kind in entry.__mro__[: entry.__mro__.index(nn.Module)]
    }
    private = {name for kind in kinds for name in vars(kind) if name[0] == "_" and name[:2] != "__"}
    assert {name for name in private if not name.startswith("_remat")} == {
        "_compiled_call_impl",
        "_replicate_for_data_parallel",
    }
    assert kinds


def test_a_compiled_original_is_planned(tmp_path: Path) -> None:
    """What `compile()` left on it is not called in the place of the plan; compiling the plan says so."""
    x = torch.randn(4, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    model.compile(backend="eager")
    ours = PlannedModule(model, (x,), {}, repeat_at_random(1), cache_dir=tmp_path)
    with pytest.warns(RematWarning, match="torch.compile changes nothing"):
        ours.compile()
    ours(x)
    assert ours.runs == {"planned": 1}
    copied = copy.deepcopy(ours)
    copied(x)
    assert copied.runs == {"planned": 1}


@pytest.mark.parametrize("around", [False, True])
def test_compiling_what_calls_a_plan_says_that_it_changes_nothing(around: bool, tmp_path: Path) -> None:
    """`torch.compile(planned)`, or of a function that calls it."""
    x = torch.randn(4, 8)
    ours = PlannedModule(nn.Linear(8, 8), (x,), {}, repeat_at_random(1), cache_dir=tmp_path)
    function = (lambda x: ours(2 * x)) if around else ours
    with pytest.warns(RematWarning, match="torch.compile changes nothing"):
        torch.compile(function, backend="eager")(x)
    assert ours.runs["planned"] == 1


def test_two_calls_in_flight_are_said_once(tmp_path: Path) -> None:
    """Each holds a budget; a call after its backward is alone."""
    x = torch.randn(4, 8)
    ours = PlannedModule(nn.Linear(8, 8), (x,), {}, repeat_at_random(1), cache_dir=tmp_path)
    for _ in range(2):
        loss = ours(x).sum()
        loss.backward()
    with pytest.warns(RematWarning, match="pending call") as caught:
        losses = [ours(x).sum() for _ in range(3)]
    torch.stack(losses).sum().backward()
    assert len(caught) == 1


class Residual(nn.Module):
    """Blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_a_forward_in_the_place_of_the_models_keeps_to_its_budget(tmp_path: Path) -> None:
    """The meter's peak of a step, the first one after it was put there included."""
    facade = pytest.importorskip("remat_facade")
    torch.manual_seed(0)
    x = torch.randn(64, 32)
    ours = facade.Hiremate(Residual(), x, "40%", cache_dir=tmp_path)

    def replaced(x: Tensor) -> Tensor:
        for block in ours.blocks:
            x = x + 2 * block(x)
        return x.square().mean()

    model = copy.deepcopy(ours.module)
    with MemoryMeter(model, x) as unplanned:
        Residual.forward(model, x).backward()
    ours.forward = replaced
    for _ in range(2):
        ours.zero_grad()
        with MemoryMeter(ours.module, x) as meter:
            ours(x).backward()
        assert meter.peak_nbytes <= ours.plan.budget_nbytes < unplanned.peak_nbytes
    assert ours.runs == {"planned": 2, "replanned": 1}


class Called(nn.Linear):
    """A class with a `__call__` of its own, that works around `forward` or in its place."""

    instead = False

    def __call__(self, x: Tensor) -> Tensor:
        if self.instead:
            return nn.functional.linear(x, self.weight).tanh()
        found: Tensor = super().__call__(x.tanh())
        return found


@pytest.mark.parametrize("instead", [False, True])
def test_a_call_of_its_own_is_planned(instead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it; the module's hooks are called once, by the original."""
    monkeypatch.setattr(Called, "instead", instead)
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    model = Called(8, 8)
    ours = PlannedModule(model, (x,), {}, repeat_at_random(1), cache_dir=tmp_path)
    assert torch.equal(model(x), ours(x))
    assert ours.runs == {"planned": 1}
    assert any(op.target.startswith("aten.tanh") for op in ours.graph.ops)
    calls: list[int] = []
    ours.register_forward_hook(lambda *_: calls.append(1))
    with pytest.warns(RematWarning, match="has hooks"):
        assert torch.equal(model(x), ours(x))
    assert len(calls) == (0 if instead else 2)


def test_a_forward_taken_away_leaves_the_classes(tmp_path: Path) -> None:
    """As of any module, whatever the original had; what was taken before can be put back."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    model = nn.Linear(8, 8)
    expected = model(x)
    first = PlannedModule(model, (x,), {}, repeat_at_random(1), cache_dir=tmp_path)
    with pytest.raises(AttributeError):
        del first.forward
    before = first.forward
    model.forward = lambda x: 5 * nn.Linear.forward(model, x)
    assert torch.equal(5 * expected, first(x).detach())
    first.forward = before
    assert torch.equal(expected, first(x).detach())
    second = PlannedModule(model, (x,), {}, repeat_at_random(1), cache_dir=tmp_path)
    assert torch.equal(5 * expected, second(x).detach())
    del second.forward
    assert torch.equal(expected, second(x).detach())


def test_a_copy_calls_what_its_forward_means(tmp_path: Path) -> None:
    """A closure over the module that was copied means that one, as in any copy; nothing of it is shared."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    ours = PlannedModule(nn.Linear(8, 8), (x,), {}, repeat_at_random(1), cache_dir=tmp_path)
    before = ours.forward
    ours.forward = lambda x: 2 * before(x)
    for first in (True, False):
        copied = copy.deepcopy(ours)
        with torch.no_grad():
            copied.weight.mul_(0.5)
        if not first:
            ours(x)
        with pytest.warns(RematWarning, match="cannot be captured"):
            assert torch.equal(2 * ours.module(x), copied(x).detach())
        before_runs = ours.runs["planned"]
        assert torch.equal(2 * ours.module(x), ours(x).detach())
        assert ours.runs["planned"] == before_runs + 1


def test_what_is_planned_is_no_part_of_another_plan(tmp_path: Path) -> None:
    """It has a budget of its own: refused at the start, the original runs where it comes later."""
    x = torch.randn(4, 8)
    inner = PlannedModule(nn.Linear(8, 8), (x,), {}, repeat_at_random(1), cache_dir=tmp_path)
    with pytest.raises(BadInput, match="submodule '0' is planned already"):
        PlannedModule(nn.Sequential(inner), (x,), {}, repeat_at_random(1), cache_dir=tmp_path)
    outer = PlannedModule(nn.Sequential(nn.Linear(8, 8)), (x,), {}, repeat_at_random(1), cache_dir=tmp_path)
    outer[0] = inner
    with pytest.warns(RematWarning, match="submodule '0' is planned itself"):
        assert torch.equal(inner.module(x), outer(x).detach())
    assert (outer.runs, inner.runs) == ({"original": 1}, {"planned": 1})


def test_names_that_only_we_show_are_the_originals_to_set(tmp_path: Path) -> None:
    """As any attribute; what is shown stays ours."""
    x = torch.randn(4, 8)
    model = nn.Linear(8, 8)
    ours = PlannedModule(model, (x,), {}, repeat_at_random(1), cache_dir=tmp_path)
    ours.plan = ours.runs = 3
    assert (model.plan, model.runs) == (3, 3)  # type: ignore[comparison-overlap]
    assert ours.plan.solver == "repeat_at_random"
