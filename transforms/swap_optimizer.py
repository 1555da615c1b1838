"""`swap_optimizer`: the optimizer's state lives in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from xtf.host import HostMemory, check_host
from xtf.optim.placement import UNPLACED, Placement
from xtf.step import TrainStep
from xtf.tree import Path, Tree


def swap_optimizer(*, host: HostMemory | None = None) -> Callable[[TrainStep], TrainStep]:
    """Optimizer state in host memory, streamed through the update leaf by leaf (Ren et al. 2021, "ZeRO-Offload", whose update runs on the
    host; here it runs on the device).

    Between updates the device holds no state; during one, that of the leaf that is updated and of the next, which is under way
    meanwhile. Updates are the same bits. The state's tensors are on the CPU, so a saved state is like any other. On CUDA they are
    pinned (**never run on hardware**).

    Args:
        host: where the state lives; by default a `xtf.host.HostMemory` for each rank, whose ``held`` counts its bytes.

    Raises:
        ValueError: if it is applied twice.

    Example:
        >>> import xtf
        >>> host = HostMemory()
        >>> model = xtf.models.preset("tiny-moe")
        >>> step = swap_optimizer(host=host)(xtf.train_step(model, xtf.optim.adamw(lr=1e-3)))
        >>> state = step.init(0)
        >>> host.held == 2 * 4 * model.param_count()[0]  # two moments in float32
        True
    """

    check_host("swap_optimizer", host)

    def transform(step: TrainStep) -> TrainStep:
        if "swap_optimizer()" in step.stack:
            raise ValueError("swap_optimizer is applied twice")
        pool, inner = host if host is not None else HostMemory(), step.optimizer

        def init(params: Tree, placement: Placement = UNPLACED) -> Any:
            return inner.init(params, _OnHost(placement, pool))

        def update(grads: Tree, state: Any, params: Tree, placement: Placement = UNPLACED) -> tuple[Tree, Any]:
            return inner.update(grads, state, params, _OnHost(placement, pool))

        return step.replace("swap_optimizer()", optimizer=inner._replace(init=init, update=update))

    return transform


@dataclass(frozen=True)
class _OnHost:
    """A placement whose optimizer state lives on the host."""

    inner: Placement
    host: HostMemory

    @property
    def donate(self) -> bool:
        return self.inner.donate

    def norm(self, grads: Tree) -> Tensor:
        return self.inner.norm(grads)

    def matrices(self, path: Path, local: Tensor) -> Tensor:
        return self.inner.matrices(path, local)

    def cut(self, path: Path, whole: Tensor) -> Tensor:
        return self.inner.cut(path, whole)
