"""The plans of the package are for graphs as they are captured now; `hatch run make-zoo` makes them anew."""

import pytest

from benchmarks.make_zoo import MODELS, graph_of
from remat_facade.planning.shipped_plans import SHIPPED, shipped_plans
from remat_graph import load_plan, structure


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_the_plans_fit_their_graphs(name: str) -> None:
    """With the peaks that the manifest has, by the referee."""
    known = MODELS[name]
    graph = graph_of(known)
    found = [each for each in shipped_plans() if each.model == known.model]
    assert len(found) == 2
    for each in found:
        assert each.structure == structure(graph)
        assert load_plan(SHIPPED / f"{each.name}.json", graph).peak_nbytes == each.peak_nbytes


def test_every_plan_is_of_a_model_that_the_script_makes() -> None:
    """No plan is left over, and none is missing."""
    made = {(known.model, known.inputs, known.loss) for known in MODELS.values()}
    assert made == {(each.model, each.inputs, each.loss) for each in shipped_plans()}
