"""`shard`: parameters, gradients and optimizer state split over ranks (fully sharded data parallelism)."""

from __future__ import annotations

from collections.abc import Callable

from xtf.collectives import Axis
from xtf.mesh import join
from xtf.step import Sharding, TrainStep


def shard(*axes: Axis, replicate: Axis | None = None, regather: bool = True) -> Callable[[TrainStep], TrainStep]:
    """Fully sharded data parallelism: ZeRO-3 (Rajbhandari et al. 2020) as FSDP schedules it (Zhao et al. 2023).

    Each leaf is split over the ranks of all ``axes`` together. A stage's leaves are gathered in one all-gather before it runs,
    started before the preceding stage runs, in forward and in backward; its gradients leave in one reduce-scatter. Per rank,
    parameters, gradients and optimizer state are 1/n of the whole, plus at most two gathered stages. Per micro-batch each rank
    sends (2 all-gathers + 1 reduce-scatter) × (n − 1)/n × bytes of parameters; embedding and head are gathered once.

    Axes carry distinct tokens: each rank takes its own part of the batch. A leaf that another transform already splits over one
    of the axes (experts, under expert parallelism) is sharded over the others.

    Args:
        axes: the mesh axes to split over, in order (a joined axis counts as those it joins). Leaves that do not divide are split
            unevenly.
        replicate: an axis whose ranks hold replicas and only sum their gradients (hybrid sharding, HSDP). With ``replicate``
            alone the step is plain data parallelism.
        regather: gather again for the backward. ``False`` keeps what the forward gathered: one all-gather less for the memory
            of all parameters.

    Raises:
        ValueError: for no axis, the same axis twice, or a step that is sharded already.

    Example:
        >>> import xtf
        >>> step = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3))
        >>> sharded = xtf.simulate(lambda mesh: shard(mesh["data"])(step).stack, data=2)
        >>> sharded
        [('shard(data=2)',), ('shard(data=2)',)]
    """
    for axis in (*axes, *([replicate] if replicate is not None else [])):
        if not isinstance(axis, Axis):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f'shard: {axis!r} is not a mesh axis; give mesh["name"]')
    split, copies = _single(*axes), _single(replicate) if replicate is not None else ()
    every = (*split, *copies)
    if not every:
        raise ValueError('shard() needs at least one mesh axis: shard(mesh["data"])')
    if len({(id(axis.mesh), axis.name) for axis in every}) != len(every):
        raise ValueError(f"shard: an axis is named twice in {[axis.name for axis in every]}")
    join(*every)  # refuses axes of different meshes

    def transform(step: TrainStep) -> TrainStep:
        if step.sharding != Sharding():
            held = [a.name for a in (*step.sharding.axes, *step.sharding.replicate)]
            raise ValueError(f"shard is applied twice: the step is already sharded over {held}; name all axes in one shard(...)")
        said = [f"{a.name}={a.size}" for a in split]
        said += [f"replicate={a.name}={a.size}" for a in copies]
        said += [] if regather else ["regather=False"]
        return step.replace(
            f"shard({', '.join(said)})",
            sharding=Sharding(split, copies, regather),
            token_axes=step.with_token_axes(every),
        )

    return transform


def _single(*axes: Axis) -> tuple[Axis, ...]:
    """The mesh axes that axes join, each by itself: a leaf may be owned over some of them and sharded over the others."""
    return tuple(axis.mesh[name] for axis in axes for name in axis.names)
