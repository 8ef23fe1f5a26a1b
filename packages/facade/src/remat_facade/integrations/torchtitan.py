"""An override for torchtitan: plans instead of its activation checkpointing.

    --override.imports 'remat_facade.integrations.torchtitan.remat={"budget": "60%"}'

As torchtitan's policies do, it limits each transformer block, before FSDP shards them. A block's step is
planned at its first call, so each block is captured with the parameters that FSDP has gathered.
"""

from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from remat_facade.entrypoints.limit_memory import check_limit, limit_memory
from remat_facade.integrations.extras import from_extra

with from_extra("torchtitan"):
    from torchtitan.config.override import derive, override
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing


@dataclass(kw_only=True, slots=True)
class RematACConfig(ActivationCheckpointing.Config):  # type: ignore[misc]
    """The budget of each transformer block by itself, and other keyword arguments of `limit_memory`."""

    budget: int | str
    options: dict[str, Any] = field(default_factory=dict)


class RematAC(ActivationCheckpointing):  # type: ignore[misc]
    """A policy of activation checkpointing: each block keeps a budget by its plan."""

    Config = RematACConfig

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        config = cast("RematACConfig", self.config)
        return limit_memory(module, config.budget, **config.options)


@override(
    target=ActivationCheckpointing.Config,
    description="a plan within a memory budget for each transformer block",
)  # type: ignore[untyped-decorator]
def remat(config: ActivationCheckpointing.Config, *, budget: int | str, **options: Any) -> RematACConfig:
    """The policy that replaces the configured one; `options` are those of `limit_memory`."""
    check_limit("remat", budget, options)
    return cast("RematACConfig", derive(config, RematACConfig, budget=budget, options=options))
