"""A plugin for axolotl.

    plugins:
      - remat_facade.integrations.axolotl.RematPlugin
    remat_budget: 20GiB

Its YAML names the plugin and the budget.
"""

from typing import Any

from pydantic import BaseModel

from remat_executor.module.gradient_states import GradientsState
from remat_executor.translation.dropped_outputs import OutputsState
from remat_facade.integrations.extras import from_extra
from remat_facade.integrations.transformers import RematCallback

with from_extra("axolotl"):
    from axolotl.integrations.base import BasePlugin


class RematArgs(BaseModel):
    """The keys that the plugin adds to the YAML.

    Attributes:
        remat_budget: as for `limit_memory`.
        remat_time_limit_s: wall-clock seconds for the solver.
        remat_outputs: as `outputs` of `Rockmate`.
        remat_gradients: as `gradients` of `Rockmate`.
    """

    remat_budget: str | int | None = None
    remat_time_limit_s: float | None = None
    remat_outputs: OutputsState | None = None
    remat_gradients: GradientsState | None = None


class RematPlugin(BasePlugin):  # type: ignore[misc]
    """Limit the memory of the model that axolotl trains."""

    def get_input_args(self) -> str:
        """Where the keys of the YAML are declared."""
        return f"{__name__}.RematArgs"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """The callback of transformers' trainer, from which axolotl's derive."""
        return [
            RematCallback(
                cfg.remat_budget,
                time_limit_s=cfg.remat_time_limit_s,
                outputs=cfg.remat_outputs,
                gradients=cfg.remat_gradients,
            )
        ]
