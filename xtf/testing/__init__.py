"""The laws: a transformed step gives what the untransformed model gives, checked in float64 on simulated ranks or on real ones.

The reference is ``torch.func.grad`` of ``model.loss`` on one rank: no engine, no custom VJP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from xtf import optim
from xtf.batch import Batch
from xtf.check_types import TypeReport, ValueTypeError, check_types
from xtf.collectives import Axis
from xtf.data.documents import Documents
from xtf.mesh import Mesh, simulate
from xtf.model import Model
from xtf.testing.judge import LawError, Report, compare, compare_steps
from xtf.testing.observe import Given, Observation, Transform, observe, observe_steps
from xtf.testing.real_ranks import on_real_ranks
from xtf.testing.samples import default_optimizer, documents_batch, random_batch, small_model, small_models

MakeModel = Callable[[], Model]
MakeOptimizer = Callable[[], optim.Optimizer]


def check(
    transform: Callable[..., Any],
    *,
    model: Model | MakeModel | Sequence[Model | MakeModel] | None = None,
    batch: Given | Sequence[Given] | None = None,
    optimizer: optim.Optimizer | MakeOptimizer | None = None,
    seed: int = 0,
    tolerance: float = 1e-12,
    steps: int | None = None,
    ranks: Literal["simulated", "gloo"] = "simulated",
    timeout: float = 300.0,
    **sizes: int,
) -> list[Report]:
    """Check that a transform changes how a step runs and not what it computes.

    Runs the transformed step on simulated or real ranks, and compares the loss, the gradient of every leaf, the gradient's norm, the
    parameters after an update and the metrics with those of ``model.loss`` under ``torch.func.grad`` on one rank. Values differ when
    max|Δ| > tolerance × max|reference|. For a gradient that is less than a ten thousandth of the largest one, such as that of queries
    that see one key, which is nothing but rounding, that bound is the largest one's, divided by ten thousand.

    With several steps all of that is compared after each of them, with as many plain steps on one rank: what a step leaves behind, in
    the optimizer's state or anywhere else, shows in the next. A step whose reference is not finite must be skipped on all ranks.

    Args:
        transform: without ``sizes`` a transform; with ``sizes`` a function of the mesh that gives one, as in
            ``lambda mesh: shard(mesh["data"])``.
        model: a model or a function that makes one, or several of them. Float64 models make the law exact; by default those of
            `small_models`: with tied embeddings, with auxiliary losses, with leaves that no gradient reaches.
        batch: the global batch, or one for each step; by default those of `random_batch` with ``seed``, ``seed + 1`` and so on, which
            have packed documents, unequal weights and a row without targets. Documents, for `xtf.transforms.balance_batch`, are given to
            every rank whole; the reference has each in a row of its own.
        optimizer: or a function that makes one; by default AdamW behind clipping.
        seed: of the initial parameters and the default batch.
        tolerance: relative, per leaf.
        steps: how many; by default as many as there are batches given, or one. A single batch is given to every step, several in turn.
        ranks: ``"simulated"``, threads of this process that meet at each collective; or ``"gloo"``, processes started for this call. To
            these everything is sent: ``transform`` must be a function of a module, and model and optimizer functions that make them.
        timeout: seconds that real ranks may take once they have started, which takes several more.
        sizes: the mesh, as in ``data=4, expert=2``.

    Returns:
        A report for each model.

    Raises:
        LawError: naming each leaf that differs and the factor by which it does: 2 for a gradient summed twice, 1/n for one that
            misses a reduction over n ranks.
        ValueError: for arguments that are not possible, or that cannot be sent to real ranks.
        TimeoutError: naming the real ranks that had not answered, and where each stood.
        RuntimeError: naming a real rank that died.

    Example:
        >>> from xtf.transforms import shard
        >>> print(check(lambda mesh: shard(mesh["data"]), model=small_models()["llama"], data=2)[0])  # doctest: +ELLIPSIS
        llama on data=2: holds; ... quantities, largest relative error ...
    """
    makers = _makers(model)
    given = _listed(batch)
    count = _steps(steps, given)
    _check_choice(transform, ranks, timeout, sizes)
    made = [one if isinstance(one, Model) else _made("model", one, Model) for one in makers]
    to_make = default_optimizer if optimizer is None else optimizer
    chosen: optim.Optimizer = to_make if isinstance(to_make, optim.Optimizer) else _made("optimizer", to_make, optim.Optimizer)
    batches = [[given[i % len(given)] if given else random_batch(one.vocab, seed=seed + i) for i in range(count)] for one in made]
    if ranks == "gloo":
        what = {"transform": transform, "model": makers, "batch": batches, "optimizer": to_make, "seed": seed}
        by_rank = on_real_ranks(_observe_all, what, timeout=timeout, sizes=sizes)
        seen = [[of_rank[at] for of_rank in by_rank] for at in range(len(made))]
    elif sizes:
        seen = [
            simulate(lambda mesh: observe_steps(mesh, transform(mesh), one, own, chosen, seed), **sizes)  # noqa: B023
            for one, own in zip(made, batches, strict=True)
        ]
    else:
        seen = [[observe_steps(None, transform, one, own, chosen, seed)] for one, own in zip(made, batches, strict=True)]
    on = ", ".join(f"{name}={size}" for name, size in sizes.items()) or "one rank"
    on += " (gloo)" if ranks == "gloo" else ""
    plain = [[documents_batch(b) if isinstance(b, Documents) else b for b in own] for own in batches]
    return [
        compare_steps(f"{one.family} on {on}", found, one, own, chosen, seed=seed, tolerance=tolerance)
        for one, found, own in zip(made, seen, plain, strict=True)
    ]


def _makers(model: Model | MakeModel | Sequence[Model | MakeModel] | None) -> list[Model | MakeModel]:
    if model is None:
        return [partial(small_model, name) for name in small_models()]
    if isinstance(model, str):
        raise ValueError(
            f"check(model={model!r}): expected an xtf Model, as one of xtf.testing.small_models(), or a function that makes one"
        )
    found = [model] if isinstance(model, Model) or callable(model) else list(model)
    if not found:
        raise ValueError("check(model=[]): expected at least one model")
    return found


def _made(what: str, make: Any, kind: type[Any]) -> Any:
    if not callable(make):
        raise ValueError(f"check({what}={make!r}): expected an xtf {kind.__name__}, or a function that makes one")
    made = make()
    if not isinstance(made, kind):
        raise ValueError(f"check({what}=...): the function returned a {type(made).__name__}, expected an xtf {kind.__name__}")
    return made


def _listed(batch: Given | Sequence[Given] | None) -> list[Given]:
    if batch is None:
        return []
    found = [batch] if isinstance(batch, Mapping | Documents) else list(batch)
    wrong = next((type(one).__name__ for one in found if not isinstance(one, Mapping | Documents)), None)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not found or wrong is not None:
        raise ValueError(f"check(batch=...): expected a batch, documents, or a list of at least one of them, got {wrong or 'none'}")
    return found


def _steps(steps: int | None, given: Sequence[Given]) -> int:
    if steps is None:
        return max(1, len(given))
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < max(1, len(given)):  # pyright: ignore[reportUnnecessaryIsInstance]
        need = f", at least as many as the {len(given)} batches" if len(given) > 1 else ", at least 1"
        raise ValueError(f"check(steps={steps!r}): expected a whole number of steps{need}")
    return steps


def _check_choice(transform: object, ranks: str, timeout: float, sizes: Mapping[str, int]) -> None:
    if not callable(transform):
        raise ValueError(f"check({transform!r}): expected a transform, or with a mesh a function of it that gives one")
    if ranks not in ("simulated", "gloo"):
        raise ValueError(f"check(ranks={ranks!r}): expected 'simulated' or 'gloo'; the number of ranks is that of the mesh, as data=2")
    if ranks == "gloo" and not sizes:
        raise ValueError("check(ranks='gloo') needs a mesh: name its axes and their sizes, as data=2")
    if not timeout > 0:
        raise ValueError(f"check(timeout={timeout!r}): expected a number of seconds above 0")


def _observe_all(
    mesh: Mesh, transform: Callable[[Mesh], Transform], model: list[Any], batch: list[list[Given]], optimizer: Any, seed: int
) -> list[list[Observation]]:
    """What this rank sees of the steps of each model; runs in its own process."""
    made = [one if isinstance(one, Model) else one() for one in model]
    own = optimizer if isinstance(optimizer, optim.Optimizer) else optimizer()
    return [observe_steps(mesh, transform(mesh), one, batches, own, seed) for one, batches in zip(made, batch, strict=True)]


__all__ = [
    "Axis",
    "Batch",
    "LawError",
    "Observation",
    "Report",
    "Transform",
    "TypeReport",
    "ValueTypeError",
    "check",
    "check_types",
    "compare",
    "compare_steps",
    "default_optimizer",
    "documents_batch",
    "observe",
    "observe_steps",
    "random_batch",
    "small_model",
    "small_models",
]
