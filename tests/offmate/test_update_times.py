"""What an update takes in a plan: the host issues those after the backward while the device waits for it."""

import pytest
from torch.optim import SGD

from remat_graph import Lane, simulate
from tests.helpers.offmates import UPDATE_S, convolutions, images, offmate

ISSUE_S = 1.0  # longer than any update of the model


@pytest.mark.parametrize("in_backward", [False, True])
def test_updates_take_at_least_their_issue(in_backward: bool) -> None:
    """On the CPU in any case; on the device unless the backward, which it computes meanwhile, hides that."""
    model = convolutions()
    module = offmate(
        model,
        images(0),
        "100%",
        issue_s=ISSUE_S,
        optimizer=SGD(model.parameters(), lr=0.1),
        optimizer_in_backward=in_backward,
    )
    updates = module.graph.updates
    numels = [parameter.numel() for parameter in model.parameters()]
    expected = [UPDATE_S * numel if in_backward else ISSUE_S for numel in numels]
    assert expected == [update.device_time_s for update in updates]
    assert {ISSUE_S} == {update.cpu_time_s for update in updates}
    timeline = simulate(module.graph, module.plan.schedule, links=module.plan.links)
    on_device = timeline.lane_s[Lane.COMPUTE] - module.graph.time_s - timeline.recomputed_s
    assert on_device == pytest.approx(sum(expected))
