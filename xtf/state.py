"""The state of training: everything that a resumed run needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from xtf import tree
from xtf.tree import Tree


class State:
    """``params``, ``opt``, ``step`` and ``skipped``: this rank's part of the parameters, the optimizer's state, the number of steps so
    far, and how many of them changed nothing: loss or gradients were not finite, or the optimizer refused them.

    A state is a value: a step takes one and returns another. A step compiled with ``donate=True`` reuses the memory of the state
    it was given; reading such a state afterwards raises.

    Args:
        params: the tree of this rank's parameters.
        opt: the optimizer's state.
        step: 0-dim int64 tensor.
        skipped: 0-dim int64 tensor.
    """

    __slots__ = ("_before", "_donated", "_opt", "_params", "_skipped", "_step")

    def __init__(self, params: Tree, opt: Tree, step: Tensor, skipped: Tensor) -> None:
        self._params, self._opt, self._step, self._skipped, self._donated = params, opt, step, skipped, False
        self._before: Callable[[], None] | None = None

    def _read(self, value: Any) -> Any:
        if self._donated:
            raise RuntimeError(
                "this state was donated: a step compiled with donate=True reused its memory. "
                "Use the state that the step returned, or compile with donate=False"
            )
        return value

    @property
    def params(self) -> Tree:
        """The tree of this rank's parameters."""
        return self._read(self._params)

    @property
    def opt(self) -> Tree:
        """The optimizer's state."""
        return self._read(self._opt)

    @property
    def step(self) -> Tensor:
        """Steps so far, skipped ones among them: 0-dim int64."""
        return self._read(self._step)

    @property
    def skipped(self) -> Tensor:
        """Steps that changed nothing, because loss or gradients were not finite or the optimizer refused them: 0-dim int64."""
        return self._read(self._skipped)

    def hold(self, wait: Callable[[], None]) -> None:
        """``wait`` is called before a step that donates overwrites this state: somebody reads it until then."""
        self._before = wait

    def release(self) -> None:
        """Wait for who reads this state, see `hold`."""
        if self._before is not None:
            self._before()
            self._before = None

    def donate(self) -> None:
        """Mark the memory as reused; every later reading of this object raises."""
        self._params = self._opt = None
        self._donated = True

    def replace(self, **changes: Any) -> State:
        """A state with some of ``params``, ``opt``, ``step``, ``skipped`` replaced."""
        new = State(**{"params": self.params, "opt": self.opt, "step": self.step, "skipped": self.skipped} | changes)
        new._before = self._before  # it shares the memory of the rest
        return new

    def __repr__(self) -> str:
        if self._donated:
            return "State(donated)"
        numel = sum(leaf.numel() for leaf in tree.leaves(self._params) if isinstance(leaf, Tensor))
        return f"State(step={int(self._step)}, {numel:,} local parameters)"


def _flatten(state: State) -> tuple[tuple[Any, ...], None]:
    return (state.params, state.opt, state.step, state.skipped), None


def _unflatten(_: Any, children: Iterable[Any]) -> State:
    return State(*children)


tree.register_node(State, _flatten, _unflatten, ("params", "opt", "step", "skipped"))
