"""`remat`: what a stage computes again in backward, and what it keeps."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition

from xtf.joint import Choose, Joint, needed, root, siblings
from xtf.partition import partitioned
from xtf.stage import PairRule, Program, Stage, recompute
from xtf.step import TrainStep

Policy = Literal["everything", "nothing"] | float | Sequence[str]
"""What is computed again: ``"everything"`` but what the stage read; ``"nothing"``; all but the values of these names; or as little as
fits a budget, a share between 0 and 1 of what ``"nothing"`` would keep."""


def remat(policy: Policy | Callable[[Stage], Policy]) -> Callable[[TrainStep], TrainStep]:
    """What is computed again in backward (Chen et al. 2016; Korthikanti et al. 2023, "Reducing activation recomputation").

    Without it a stage keeps what it read and computes everything again. What is kept is a list of tensors, which
    `xtf.transforms.swap_activations` may move like any other. Gradients are the same, and in eager mode the same bits. Which experts a
    token goes to is never decided twice.

    Args:
        policy: one for all stages, or a function of the stage. Names are those that models give (`xtf.keep`): ``"qkv"`` and
            ``"attention"`` in attention, ``"gate_up"``, ``"shared_gate_up"`` and ``"expert_gate_up"`` in MLPs and experts. A budget is
            spent by torch's min-cut partitioner, which computes again first what is cheap (``activation_memory_budget``).

    Raises:
        ValueError: for a policy that is none of these, or that names what no stage of the program has; or if ``remat`` is applied twice.

    Example:
        >>> import xtf
        >>> step = xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3))
        >>> step = remat(["attention", "qkv"])(step)
        >>> remat(["scores"])(xtf.train_step(xtf.models.preset("tiny-moe"), xtf.optim.adamw(lr=1e-3))).program
        Traceback (most recent call last):
        ValueError: remat: no stage names 'scores'; the program names attention, expert_gate_up, qkv. A stage of your own says ...
    """
    if not callable(policy):
        _check(policy)

    def own_policy(stage: Stage) -> Policy:
        if not callable(policy):
            return policy
        try:
            return _check(policy(stage))
        except Exception as error:
            error.add_note(f"when remat asked its policy about the stage {stage.name}: it is called as policy(stage)")
            raise

    def transform(step: TrainStep) -> TrainStep:
        if any(name.startswith("remat") for name in step.stack):
            raise ValueError("remat is applied twice: give one policy, or a function of the stage")

        def rewrite(step: TrainStep, program: Program) -> Program:
            names = sorted({name for node in program if isinstance(node, Stage) for name in node.named})
            if not callable(policy):
                _check_names(policy, names)

            def with_policy(stage: Stage) -> Stage:
                own = own_policy(stage)
                _check_names(own, names)
                return dataclasses.replace(stage, rule=_with_base(stage.rule, _rule(own, stage)))

            return tuple(with_policy(node) if isinstance(node, Stage) else node for node in program)

        return step.replace(f"remat({_said(policy)})", rewrites=(*step.rewrites, rewrite))

    return transform


def _check(policy: Any) -> Policy:
    if isinstance(policy, str):
        if policy in ("everything", "nothing"):
            return cast(Policy, policy)
    elif isinstance(policy, int | float) and not isinstance(policy, bool):
        if 0 <= policy <= 1:
            return policy
    elif isinstance(policy, Sequence) and policy and all(isinstance(name, str) for name in cast(Sequence[object], policy)):
        return cast(Policy, policy)
    raise ValueError(
        f"remat({policy!r}): expected 'everything', 'nothing', names of values to keep, as ['attention', 'qkv'], a budget from 0 to 1, "
        "or a function of the stage that gives one of these"
    )


def _check_names(policy: Policy, names: Sequence[str]) -> None:
    for name in () if isinstance(policy, str | int | float) else policy:
        if name not in names:
            raise ValueError(
                f"remat: no stage names {name!r}; the program names {', '.join(names) or 'nothing'}. A stage of your own says what its "
                "function names with xtf.keep in Stage(named=...)"
            )


def _said(policy: object) -> str:
    if callable(policy):
        return getattr(policy, "__name__", "policy")
    return ", ".join(policy) if isinstance(policy, list | tuple) else str(policy)  # pyright: ignore[reportUnknownArgumentType]


def _with_base(rule: PairRule, base: PairRule) -> PairRule:
    """The rule with another in place of `recompute`, wherever it stands on that; one that does not is as it was."""
    if rule is recompute:
        return base
    inner: PairRule | None = getattr(rule, "base", None)
    return rule if inner is None else cast(Any, dataclasses.replace)(rule, base=_with_base(inner, base))


def _rule(policy: Policy, stage: Stage) -> PairRule:
    if isinstance(policy, int | float):
        return partitioned(within(float(policy)), ("within", float(policy))) if policy > 0 else recompute
    if isinstance(policy, str):
        return recompute if policy == "everything" else partitioned(all_of_forward, "nothing")
    names = tuple(name for name in policy if name in stage.named)
    return partitioned(named(names), ("named", names)) if names else recompute


def all_of_forward(joint: Joint) -> Iterable[fx.Node]:
    """What the forward computes and the backward needs: nothing of the forward is computed again."""
    forward = needed(joint.outputs[: len(joint.writes)])
    found, seen = set[fx.Node](), set[fx.Node](joint.inputs)
    waiting = [out for out in joint.outputs[len(joint.writes) :] if isinstance(out, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in forward or (node.target is operator.getitem and node.args[0] in forward):
            found.add(node)
        else:
            waiting += node.all_input_nodes
    return found


def named(names: Sequence[str]) -> Choose:
    """Keeps the values of these names, with what else the operations gave that made them."""

    def choose(joint: Joint) -> Iterable[fx.Node]:
        if missing := sorted(set(names) - joint.names.keys()):
            raise ValueError(f"remat: a stage is said to name {missing}, but its function does not; it names {sorted(joint.names)}")
        return [node for name in names for tagged in joint.names[name] for node in siblings(root(tagged))]

    return choose


def within(budget: float) -> Choose:
    """Keeps what torch's partitioner would under ``activation_memory_budget``."""

    def choose(joint: Joint) -> Iterable[fx.Node]:
        module = fx.GraphModule(joint.module, copy.deepcopy(joint.module.graph))
        static = list(range(len(joint.params)))
        with functorch_config.patch(activation_memory_budget=budget):  # pyright: ignore[reportUnknownMemberType]
            cutter: Any = min_cut_rematerialization_partition
            forward, _ = cutter(module, None, num_fwd_outputs=len(joint.writes), static_lifetime_input_indices=static)
        (outputs,) = next(node for node in forward.graph.nodes if node.op == "output").args
        kept = {out.name for out in outputs[len(joint.writes) :]}
        return [node for node in joint.module.graph.nodes if node.name in kept]

    return choose
