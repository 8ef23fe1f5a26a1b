"""Lengths rounded up to buckets: as few plans as buckets, and the numbers of the unpadded call."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat_executor import BadInput, Buckets, PlannedModule
from tests.helpers.models import import_transformers
from tests.helpers.planners import repeat_at_random

TOKENS = {"input_ids": 0, "attention_mask": 0, "labels": -100}


def language_model(family: str) -> nn.Module:
    """A small decoder without dropout: its logits are in double precision, its loss is in single."""
    transformers = import_transformers()
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2,
            n_embd=32,
            n_head=2,
            vocab_size=60,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=60,
            max_position_embeddings=64,
        )
        model = transformers.LlamaForCausalLM(config)
    model.config.use_cache = False
    model.loss_type = "ForCausalLM"
    return model.double()


def batch(length: int) -> dict[str, Tensor]:
    """Two sequences, the second with three positions masked at its end."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, 60, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.filterwarnings("ignore::remat_executor.RematWarning")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_lengths_share_plans_and_keep_their_numbers(family: str, tmp_path: Path) -> None:
    """Six lengths, two buckets, two plans; loss, logits and gradients of the unpadded call up to rounding."""
    original = language_model(family)
    buckets = Buckets(sizes=(16, 24), pad=TOKENS)
    planned = PlannedModule(
        copy.deepcopy(original),
        (),
        batch(11),
        repeat_at_random(12),
        cache_dir=tmp_path,
        buckets=buckets,
        differentiate=[0],
    )
    assert planned.graph.time_s > 0
    for length in (11, 16, 9, 20, 24, 13):
        found = []
        for module in (original, planned):
            module.zero_grad()
            output = module(**batch(length))
            output.loss.backward()
            found.append((output, {name: p.grad.clone() for name, p in module.named_parameters()}))
        (expected, expected_grads), (actual, actual_grads) = found
        assert expected.logits.shape == actual.logits.shape
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(actual_grads, expected_grads, rtol=1e-5, atol=1e-7)
        seen = batch(length)["attention_mask"].bool()
        torch.testing.assert_close(actual.logits[seen], expected.logits[seen], rtol=1e-9, atol=1e-11)
    assert planned.runs == {"planned": 6, "replanned": 1}


class Scaled(nn.Module):
    """Positions that do not see each other, and a summary that sees them all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Tensor]:
        y = self.linear(x).tanh() * scale
        return {"all": y, "sum": y.sum(1), "mask": y if mask is None else y * mask[..., None]}


@pytest.mark.filterwarnings("ignore::remat_executor.RematWarning")
def test_outputs_are_cut_under_autograd(tmp_path: Path) -> None:
    """An input gets its gradient through padding and cut; positional inputs are found by their names."""
    torch.manual_seed(0)
    original = Scaled()
    planned = PlannedModule(
        copy.deepcopy(original),
        (torch.randn(2, 5, 4, requires_grad=True), None),
        {},
        repeat_at_random(3),
        cache_dir=tmp_path,
        buckets=Buckets(sizes=8, pad={"x": 0.0, "mask": False}),
    )
    for length, mask in ((5, None), (8, None), (11, None), (6, torch.rand(2, 6) > 0.5)):
        grads = []
        for module in (original, planned):
            x = torch.randn(2, length, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
            output = module(x, mask)
            assert output["all"].shape == (2, length, 4)
            (output["all"].square().sum() + output["mask"].sum()).backward()
            grads.append(x.grad)
        assert torch.equal(*grads)
    # One bucket of 8, one of 16, one with a mask.
    assert planned.runs == {"planned": 4, "replanned": 2}


@pytest.mark.filterwarnings("ignore::remat_executor.RematWarning")
def test_named_outputs_alone_are_cut(tmp_path: Path) -> None:
    """A size that is the bucket's by chance stays where cut= names others; a wrong name is one line."""
    module = Scaled()
    x = torch.randn(2, 3, 4)

    def planned(cut: tuple[int, ...] | None) -> Any:
        return PlannedModule(
            module,
            (x,),
            {},
            repeat_at_random(0),
            cache_dir=tmp_path,
            buckets=Buckets(sizes=4, pad={"x": 0}, cut=cut),
        )(x)

    assert planned(None)["sum"].shape == (2, 3)  # its width is the bucket's
    assert planned((0, 2))["sum"].shape == (2, 4)
    assert planned((0, 2))["all"].shape == (2, 3, 4)
    with pytest.raises(BadInput, match=r"output 3 of 3|output 9 of 3"):
        planned((9,))


@pytest.mark.filterwarnings("ignore:the forward changes seen:remat_executor.RematWarning")
def test_without_gradients_nothing_is_padded(tmp_path: Path) -> None:
    """The original runs on what it was given."""
    seen: list[int] = []

    class Watching(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.shape[1])
            return self.linear(x)

    x = torch.randn(2, 3, 4)
    planned = PlannedModule(
        Watching(),
        (x,),
        {},
        repeat_at_random(0),
        cache_dir=tmp_path,
        buckets=Buckets(sizes=4, pad={"x": 0}),
    )
    seen.clear()
    with torch.no_grad():
        planned(x)
    assert seen == [3]
    assert planned.runs == {"original": 1}


def test_lengths() -> None:
    """The smallest bucket that holds a length; a length beyond them all is its own."""
    listed, multiples = Buckets(sizes=[64, 16], pad={"x": 0}), Buckets(sizes=16, pad={"x": 0})
    assert [listed.length(n) for n in (1, 16, 17, 64, 65)] == [16, 16, 64, 64, 65]
    assert [multiples.length(n) for n in (1, 16, 17, 65)] == [16, 16, 32, 80]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"sizes": (), "pad": {"x": 0}}, r"sizes \(\).*give lengths"),
        ({"sizes": (8, -1), "pad": {"x": 0}}, "sizes"),
        ({"sizes": "8", "pad": {"x": 0}}, "sizes '8'"),
        ({"sizes": True, "pad": {"x": 0}}, "sizes"),
        ({"sizes": 8, "pad": {}}, "name inputs"),
        ({"sizes": 8, "pad": ["x"]}, "name inputs"),
        ({"sizes": 8, "pad": {"x": "0"}}, "a number"),
        ({"sizes": 8, "pad": {"x": 0}, "dim": -1}, "counted from the front"),
        ({"sizes": 8, "pad": {"x": 0}, "cut": (-1,)}, "indices of output tensors"),
    ],
)
def test_bad_specs(spec: dict[str, Any], said: str) -> None:
    """Each is one line, said before any work."""
    with pytest.raises(BadInput, match=said) as caught:
        Buckets(**spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pad", "args", "said"),
    [
        ({"tokens": 0}, (torch.randn(2, 3, 4),), "none is among the inputs"),
        ({"x": 0, "mask": 0}, (torch.randn(2, 3, 4), torch.ones(2, 2)), "lengths differ"),
        ({"x": 0, "scale": 0}, (torch.randn(2, 3, 4), None, 2.0), "scale is float"),
        ({"mask": 0.5}, (torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.int64)), "no 0.5"),
        ({"mask": 2}, (torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)), "True or False"),
    ],
)
def test_calls_that_cannot_be_padded(
    pad: dict[str, Any], args: tuple[Any, ...], said: str, tmp_path: Path
) -> None:
    """What does not fit the inputs is one line that names the input."""
    with pytest.raises(BadInput, match=said) as caught:
        PlannedModule(
            Scaled(),
            args,
            {},
            repeat_at_random(0),
            cache_dir=tmp_path,
            buckets=Buckets(sizes=8, pad=pad),
        )
    assert "\n" not in str(caught.value)
