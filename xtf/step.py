"""The training step: a record of seams, and what follows from them.

A transform takes a `TrainStep` and returns one with some seams replaced; the step derives everything else (placements, program,
transfers) once, when it is first used, so that transforms may be composed in any order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from xtf import tree
from xtf.backends import backend_of
from xtf.batch import Batch
from xtf.collectives import Axis
from xtf.collectives.planned import read
from xtf.data.documents import Documents
from xtf.describe import describe
from xtf.deterministic import where_asked
from xtf.mesh import join
from xtf.model import Model
from xtf.ops import Ops
from xtf.optim import Optimizer, advance
from xtf.overlap import Layout, overlapped
from xtf.placement import Placed, Placement, cut, gather_transfer, place, reduce_transfer, uncut
from xtf.record import Record
from xtf.spec import ParamSpec
from xtf.stage import Lower, Pair, Program, Rows, Stage
from xtf.state import State
from xtf.step_loss import StepLoss
from xtf.tree import Path, Tree
from xtf.walk import Outcome, Plan, walk
from xtf.whole_step import Differentiate

_CPU = torch.device("cpu")

Rewrite = Callable[["TrainStep", Program], Program]
"""``(finished step, program) -> program``: replaces, adds or reorders stages."""

Split = Callable[[Any], Sequence[Batch]]
"""What a step is given as this rank's micro-batches; their number is the same on all ranks. A step is given this rank's part of the batch,
or what a transform's own split takes, as that of `xtf.transforms.balance_batch` takes the global `xtf.data.Documents`."""


Tokens = Callable[[dict[str, Any]], dict[str, Any]]
"""The constants of a micro-batch's tokens -> those of the tokens that this rank computes with."""


@dataclass(frozen=True)
class Precision:
    """Dtypes: ``params`` are stored in, ``compute`` is what stages see (and what is gathered), ``reduce`` is what gradients are
    summed in over ranks. ``None`` leaves the parameters' own."""

    params: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None


@dataclass(frozen=True)
class Sharding:
    """The axes that leaves are split over, the axes that hold replicas, and whether parameters are gathered again for backward."""

    axes: tuple[Axis, ...] = ()
    replicate: tuple[Axis, ...] = ()
    regather: bool = True


@dataclass(frozen=True)
class Compilation:
    """How a step is lowered.

    Args:
        backend: its name.
        lower: lowers what stages are made of.
        donate: whether states are donated.
        deterministic: whether only deterministic algorithms are used.
        whole: what runs the walk of a step as one graph (`xtf.whole_step`), or ``None`` where the walk runs stage by stage.
    """

    backend: str
    lower: Lower
    donate: bool = False
    deterministic: bool = False
    whole: Callable[[TrainStep], Differentiate] | None = None

    @property
    def done(self) -> bool:
        """Whether a step with this was compiled."""
        return self.backend != "eager" or self.donate or self.deterministic or self.whole is not None


def eager(fn: Callable[..., Any], key: object) -> Callable[..., Any]:
    """The lowering that changes nothing."""
    return fn


_deterministically = where_asked(lambda step: step.compilation.deterministic)


@dataclass(frozen=True)
class TrainStep:
    """A pure training step ``(state, batch) -> (state, metrics)``, as a record of seams.

    Made by `train_step`; transforms replace fields of it. Its methods take and return *this rank's* trees.

    Args:
        model: the model.
        optimizer: the optimizer.
        stack: what was applied, innermost first, for `repr`.
        token_axes: mesh axes whose ranks hold different parts of the batch. Loss, metrics and gradients are summed over them.
        sequence_axes: those of ``token_axes`` whose ranks are given the *same* rows, of which each takes its own tokens (``tokens``).
        owned: for a logical axis of parameters, the mesh axis on which stages compute on parts of it.
        sharding: where leaves live (`xtf.transforms.shard`).
        precision: dtypes (`xtf.transforms.precision`).
        split: the batch seam.
        tokens: from the packed constants of a micro-batch (`xtf.model.Model.pack`) to those of this rank's tokens.
        parts: in how many parts the tokens of a micro-batch run where the program has exchanges (`xtf.overlap`).
        rewrites: the program seam: applied in order to the model's stages.
        declarations: applied to each stage of the finished program, to declare transfers on it.
        ops: the kernels; by default the best for the device of the parameters.
        compilation: how stages are lowered.
    """

    model: Model
    optimizer: Optimizer
    stack: tuple[str, ...] = ()
    token_axes: tuple[Axis, ...] = ()
    sequence_axes: tuple[Axis, ...] = ()
    owned: Mapping[str, Axis] = dataclasses.field(default_factory=dict[str, Axis])
    sharding: Sharding = Sharding()
    precision: Precision = Precision()
    split: Split = lambda batch: (batch,)
    tokens: Tokens = lambda consts: consts
    parts: int = 1
    rewrites: tuple[Rewrite, ...] = ()
    declarations: tuple[Callable[[TrainStep, Stage], Stage], ...] = ()
    ops: Ops | None = None
    compilation: Compilation = Compilation("eager", eager)
    device: torch.device = _CPU

    # What transforms use ---------------------------------------------------------------------------------------------------------

    def replace(self, name: str, **seams: Any) -> TrainStep:
        """A step with seams replaced, and ``name`` on its stack.

        Raises:
            ValueError: if the step is compiled, or there is no such seam.
        """
        if self.compilation.done:
            raise ValueError(f"{name} is applied to a step that is compiled already: apply all transforms first, then xtf.compile")
        known = {field.name for field in dataclasses.fields(self)}
        if not seams.keys() <= known:
            raise ValueError(f"a step has no seam {sorted(seams.keys() - known)}; it has {sorted(known)}")
        return dataclasses.replace(self, stack=(*self.stack, name), **seams)

    def with_token_axes(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        """``token_axes`` and ``axes`` together, each mesh axis once.

        Raises:
            ValueError: if two of them share a mesh axis without being the same, or are of different meshes.
        """
        return merge_axes((*self.token_axes, *axes))

    # What follows from the seams -------------------------------------------------------------------------------------------------

    @cached_property
    def specs(self) -> dict[Path, ParamSpec]:
        """Each leaf's spec, in the dtype in which it is stored. What is not trained keeps its own."""
        found: dict[Path, ParamSpec] = tree.items(self.model.specs)
        dtype = self.precision.params
        casts = {path for path, spec in found.items() if dtype and spec.trainable and spec.dtype.is_floating_point}
        return {path: dataclasses.replace(spec, dtype=dtype) if path in casts else spec for path, spec in found.items()}

    @cached_property
    def placements(self) -> dict[Path, Placement]:
        """Each leaf's place on the mesh."""
        return {path: place(spec, self.owned, self.sharding.axes) for path, spec in self.specs.items()}

    def placed(self, *, donate: bool = False) -> Placed:
        """The placements as optimizers use them."""
        return Placed(self.placements, donate)

    @cached_property
    def program(self) -> Program:
        """The finished program: the model's stages rewritten, with every transfer declared."""
        program: Program = self.model.build(self.ops or backend_of(self.device).ops)
        for rewrite in self.rewrites:
            program = rewrite(self, program)
        _check_program(program)
        return tuple(self._declare(node) if isinstance(node, Stage) else node for node in program)

    def _declare(self, stage: Stage) -> Stage:
        for declare in self.declarations:
            stage = declare(self, stage)
        own = {name: self.placements[path] for name, path in stage.params.items()}
        trained = {path: self.placements[path] for path in stage.params.values() if self.specs[path].trainable}
        sums = merge_axes((*self.token_axes, *stage.partial_over))
        return dataclasses.replace(
            stage,
            gather=gather_transfer(stage.name, own, self.precision.compute),
            reduce=reduce_transfer(stage.name, trained, dict.fromkeys(trained, sums), self.precision.reduce, self.precision.compute),
            regather=self.sharding.regather,
        )

    @cached_property
    def pairs(self) -> tuple[Pair | None, ...]:
        """Each stage as the walk runs it."""
        whole = self.compilation.lower

        def in_parts(fn: Callable[..., Any], key: Hashable) -> Callable[..., Any]:
            return whole(fn, key if isinstance(key, Rows) else Rows(key))  # parts differ in length from batch to batch

        lower: Lower = in_parts if self.parts > 1 else whole
        rows = self.parts > 1
        keys = {s.name: Rows(s.key) if rows and not isinstance(s.key, Rows) else s.key for s in self.program if isinstance(s, Stage)}
        return tuple(s.rule(s.fn, keys[s.name], lower) if isinstance(s, Stage) else None for s in self.program)

    def plan(self, layout: Layout = (1,)) -> Plan:
        """What the walk runs on a micro-batch: the program and its pairs, in the parts of ``layout`` (`xtf.overlap`)."""
        if layout not in self._plans:
            self._plans[layout] = Plan(*overlapped(self.program, self.pairs, layout))
        return self._plans[layout]

    @cached_property
    def _plans(self) -> dict[Layout, Plan]:
        return {}

    @cached_property
    def token_axis(self) -> Axis | None:
        """All axes of distinct tokens as one."""
        return join(*self.token_axes) if self.token_axes else None

    @property
    def row_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks are given different rows of the batch: ``token_axes`` but for ``sequence_axes``. Their names are the
        ``axes`` of `xtf.split_batch`."""
        same = {name for axis in self.sequence_axes for name in axis.names}
        return tuple(axis for axis in self.token_axes if not same & set(axis.names))

    @cached_property
    def row_axis(self) -> Axis | None:
        """All axes of different rows as one."""
        return join(*self.row_axes) if self.row_axes else None

    # Parameters and state --------------------------------------------------------------------------------------------------------

    def init(self, seed: int) -> State:
        """The initial state of this rank. Values depend on ``seed``, the leaf and the index only, not on the layout."""
        params = {path: placement.spec.initial(seed, path, placement.ranges()) for path, placement in self.placements.items()}
        return self.state(self.tree_of(params), handed_over=True)

    def state(self, params: Tree, *, handed_over: bool = False) -> State:
        """A state with these local parameters, a fresh optimizer state, and step 0.

        A step that donates will overwrite the state, so the state gets a copy of the parameters then, unless they are
        ``handed_over``: nobody else uses them.
        """
        if self.compilation.donate and not handed_over:
            params = tree.map(torch.clone, params)
        trained = tree.from_items(
            self.model.specs, {path: leaf if self.specs[path].trainable else None for path, leaf in tree.items(params).items()}
        )
        zero = torch.zeros((), dtype=torch.int64)
        return State(params, self.optimizer.init(trained, self.placed()), zero, zero.clone())

    def tree_of(self, leaves: Mapping[Path, Any]) -> Tree:
        """A tree of the parameters' structure from ``{path: leaf}``, on the step's device."""
        return tree.from_items(
            self.model.specs, {p: leaf.to(self.device) if isinstance(leaf, Tensor) else leaf for p, leaf in leaves.items()}
        )

    def place(self, full: Tree) -> Tree:
        """This rank's blocks of a whole tree of the parameters' structure (parameters, gradients, moments)."""
        leaves = self._leaves(full)
        for path, leaf in leaves.items():
            if leaf is not None and tuple(leaf.shape) != self.specs[path].shape:
                raise ValueError(f"{path} has shape {tuple(leaf.shape)}; place takes whole leaves, of shape {self.specs[path].shape}")
        return self.tree_of({path: None if leaf is None else cut(leaf, self.placements[path]) for path, leaf in leaves.items()})

    def full(self, local: Tree) -> Tree:
        """The whole tree, on every rank, from the ranks' blocks: the inverse of `place`."""
        leaves = self._leaves(local)
        for path, leaf in leaves.items():
            if leaf is not None and tuple(leaf.shape) != self.placements[path].shape():
                raise ValueError(
                    f"{path} has shape {tuple(leaf.shape)}; full takes what this rank keeps, of shape {self.placements[path].shape()}"
                )
        return self.tree_of({path: None if leaf is None else uncut(leaf, self.placements[path]) for path, leaf in leaves.items()})

    def _leaves(self, params: Tree) -> dict[Path, Any]:
        if isinstance(params, State):
            raise ValueError("expected parameters, got a State: give state.params")
        if not tree.same_structure(params, self.model.specs):
            given, wanted = set(tree.paths(params)), set(self.specs)
            raise ValueError(
                f"the tree is not of the parameters' structure: missing {sorted(wanted - given)[:5]}, unknown {sorted(given - wanted)[:5]}"
            )
        return tree.items(params)

    def _local(self, params: Tree) -> dict[Path, Tensor]:
        leaves = {path: leaf.detach() for path, leaf in self._leaves(params).items()}
        for path, leaf in leaves.items():
            shape, dtype = self.placements[path].shape(), self.specs[path].dtype
            if tuple(leaf.shape) != shape or leaf.dtype != dtype:
                raise ValueError(
                    f"parameter {path} is {leaf.dtype} of shape {tuple(leaf.shape)}; this rank keeps {dtype} of shape {shape}: "
                    "make local parameters with step.init, step.place or xtf.load"
                )
        return leaves

    # Running ---------------------------------------------------------------------------------------------------------------------

    @_deterministically
    def __call__(self, state: State, batch: Batch | Documents, *, record: Record | None = None) -> tuple[State, dict[str, Tensor]]:
        """One step. Where the loss or the gradients' norm is not finite, or the optimizer refuses it (`xtf.optim.skip_spikes`), it is
        skipped: it counts in ``state.step`` and ``state.skipped``, and changes nothing else.

        Args:
            state: this rank's state.
            batch: this rank's part of the batch (`xtf.batch`); of a step with `xtf.transforms.balance_batch` also all documents of all
                ranks.
            record: where the walk's events go.

        Returns:
            The new state, and metrics that are the same on every rank: ``loss``, ``cross_entropy``, ``grad_norm``, ``tokens``
            (supervised ones of all ranks), ``skipped`` (1 if this step was, else 0), those of the auxiliary loss and of the optimizer.

        Raises:
            ValueError: for a batch that is not one, or parameters that are not this rank's.
        """
        if not isinstance(state, State):  # pyright: ignore[reportUnnecessaryIsInstance]
            how = "step.init(seed), step.state(params) or xtf.load(step, path)"
            raise ValueError(f"step(state, batch) takes a State, got {type(state).__name__}: make one with {how}")
        donate = self.compilation.donate
        params, placed, run = state.params, self.placed(donate=donate), StepLoss(self, batch, record)
        metrics, grads = self._differentiate(params, run, record)
        metrics["grad_norm"] = placed.norm(grads)
        if donate:
            state.release()
        skipped = torch.zeros_like(state.skipped)
        accepted, opt = (metrics["loss"] + metrics["grad_norm"]).isfinite(), state.opt
        if self.optimizer.judge is not None:
            fine, opt = self.optimizer.judge(opt, metrics)
            accepted = accepted & fine.to(accepted.device)
        if read(accepted, lambda: torch.tensor(True)):
            params, opt = advance(self.optimizer, grads, opt, params, placed)
            params = self._update_untrained(params, run)
        else:
            skipped, opt = skipped + 1, state.opt
        new = State(params, opt, state.step + 1, state.skipped + skipped)
        metrics = self.optimizer.metrics(opt) | metrics | {"skipped": skipped}
        if donate:
            state.donate()
        return new, metrics

    def _update_untrained(self, params: Tree, run: StepLoss) -> Tree:
        """What the model itself changes after a step, as routers' corrections."""
        if self.model.update is None:
            return params
        leaves = tree.items(params)
        untrained = {path: leaf for path, leaf in leaves.items() if not self.specs[path].trainable}
        return self.tree_of(leaves | dict(self.model.update(untrained, run.counts())))

    @_deterministically
    def value_and_grad(self, params: Tree, batch: Batch | Documents, *, record: Record | None = None) -> tuple[Tensor, Tree]:
        """The loss (global, shape ()) and this rank's gradients, a tree like ``params`` with ``None`` for what is not trained."""
        metrics, grads = self._differentiate(params, StepLoss(self, batch, record), record)
        return metrics["loss"], grads

    def loss(self, params: Tree, batch: Batch | Documents) -> Tensor:
        """The loss of a batch (global, shape ()); nothing is differentiated, nothing changes."""
        return self.evaluate(params, batch)["loss"]

    @_deterministically
    def evaluate(self, params: Tree, batch: Batch | Documents, *, record: Record | None = None) -> dict[str, Tensor]:
        """The metrics of a batch without training on it: ``loss``, ``cross_entropy``, ``tokens`` and the auxiliary loss's."""
        run = StepLoss(self, batch, record)
        values = self._run_walk(self._local(params), run, record, False).values
        if run.counts_first:
            run.count(values)
        else:
            for micro, final in enumerate(values):
                run.seeds(micro, final)
        return run.metrics(values)

    def _differentiate(self, params: Tree, run: StepLoss, record: Record | None) -> tuple[dict[str, Tensor], Tree]:
        local = self._local(params)
        outcome = self._run_walk(local, run, record, True)
        grads = {path: _grad(outcome.grads, path, leaf) if self.specs[path].trainable else None for path, leaf in local.items()}
        return run.metrics(outcome.values), tree.from_items(self.model.specs, grads)

    def walked(self, local: Mapping[Path, Tensor], run: StepLoss, record: Record | None, backward: bool) -> Outcome:
        """The walk of a step, and what it takes to begin its backward."""
        if not backward:
            return walk(run.plans, local, run.micros, keep=run.keep, record=record)
        if run.counts_first:
            run.count(walk(run.plans, local, run.micros, keep=run.keep, record=record).values)
        trained = frozenset(path for path, spec in self.specs.items() if spec.trainable)
        return walk(run.plans, local, run.micros, keep=run.keep, seeds=run.seeds, trained=trained, record=record)

    @cached_property
    def _run_walk(self) -> Differentiate:
        return self.walked if self.compilation.whole is None else self.compilation.whole(self)

    def __repr__(self) -> str:
        return describe(self)


def _grad(grads: Mapping[Path, Tensor], path: Path, leaf: Tensor) -> Tensor:
    return grads[path] if path in grads else torch.zeros_like(leaf)


def merge_axes(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Axes in order of first appearance, each once.

    Raises:
        ValueError: if two share a mesh axis without being the same, or are of different meshes.
    """
    found: dict[tuple[str, ...], Axis] = {}
    for axis in axes:
        if axis.mesh is not axes[0].mesh:
            raise ValueError(f"axes {axes[0].name!r} of {axes[0].mesh} and {axis.name!r} of {axis.mesh}: a step has one mesh, use its axes")
        clash = next((a for names, a in found.items() if set(names) & set(axis.names) and names != axis.names), None)
        if clash is not None:
            raise ValueError(f"axes {clash.name!r} and {axis.name!r} overlap: name each mesh axis by itself")
        found[axis.names] = axis
    return tuple(found.values())


def _check_program(program: Program) -> None:
    """Refuse a program whose stages cannot be run in order, or that disagree about a shared parameter."""
    written, partial = set[str](), dict[Path, tuple[str, tuple[str, ...]]]()
    names = [node.name for node in program]
    if len(set(names)) != len(names):
        raise ValueError(f"stage names must be unique; twice: {sorted({n for n in names if names.count(n) > 1})}")
    for node in program:
        missing = [name for name in node.reads if name not in written]
        if missing:
            raise ValueError(f"stage {node.name} reads {missing}, which no earlier stage writes; written so far: {sorted(written)}")
        written |= set(node.writes)
        if not isinstance(node, Stage):
            continue
        axes = tuple(str(axis.name) for axis in node.partial_over)
        for path in node.params.values():
            other, had = partial.setdefault(path, (node.name, axes))
            if had != axes:
                raise ValueError(
                    f"parameter {path} is shared by {other} (gradient partial over {had}) and {node.name} (partial over {axes}): "
                    "its gradients cannot be summed in one reduction; make both stages agree"
                )
    if "loss" not in written:
        raise ValueError(f"no stage writes 'loss'; the program writes {sorted(written)}")


def train_step(model: Model, optimizer: Optimizer, *, device: torch.device | str = "cpu") -> TrainStep:
    """A training step on one rank; wrap it with transforms (`xtf.compose`), then `xtf.compile` it.

    Example:
        >>> import xtf
        >>> step = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3))
    """
    given: list[tuple[str, object, type]] = [("model", model, Model), ("optimizer", optimizer, Optimizer)]
    for name, value, kind in given:
        if not isinstance(value, kind):
            raise ValueError(f"train_step(model, optimizer): {name} is a {type(value).__name__}, expected a xtf {kind.__name__}")
    return TrainStep(model, optimizer, device=torch.device(device))


def compose(*transforms: Callable[[TrainStep], TrainStep]) -> Callable[[TrainStep], TrainStep]:
    """Several transforms as one: ``compose(a, b)(step)`` is ``a(b(step))``.

    Raises:
        TypeError: if something given is not callable.
    """
    for at, transform in enumerate(transforms):
        if not callable(transform):
            raise TypeError(f"compose: argument {at} is {transform!r}, not a transform: give functions TrainStep -> TrainStep")

    def composed(step: TrainStep) -> TrainStep:
        for transform in reversed(transforms):
            step = apply(transform, step)
        return step

    return composed


def apply(transform: Callable[[TrainStep], TrainStep], step: TrainStep) -> TrainStep:
    """``transform(step)``, checked to be a step.

    Raises:
        TypeError: if the transform returned something else: most often one that takes arguments first, as ``chunk_loss()``.
    """
    out = transform(step)
    if not isinstance(out, TrainStep):  # pyright: ignore[reportUnnecessaryIsInstance]
        name = getattr(transform, "__name__", repr(transform))
        raise TypeError(
            f"the transform {name} returned a {type(out).__name__}, not a TrainStep; is it a factory to be called first, as {name}()?"
        )
    return out
