"""A parallel layout that is not in xtf, written as a transform and checked by one call: tensor parallelism.

    python examples/new_layout.py

Megatron's cut (Shoeybi et al. 2019): each rank computes some heads of the attention and some columns of the MLP, on the same
tokens, and the ranks' outputs are summed. Three declarations make it: which logical axes of parameters the new mesh axis owns,
what travels before and after a stage, and that the stage's gradients of unsplit leaves (norms) are partial sums.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

import xtf
from xtf.collectives import Axis
from xtf.stage import Exchange, Program, Stage, Transfer
from xtf.step import TrainStep
from xtf.transforms import chunk_loss, shard

KINDS = ("attention", "mlp")


def tensor_parallel(axis: Axis) -> Callable[[TrainStep], TrainStep]:
    """Split attention heads and MLP columns over ``axis``, whose ranks see the same tokens."""
    pass_on = Transfer(lambda value: value, lambda value: value)

    def total(name: str) -> Transfer:
        return Transfer(lambda x: axis.start_all_reduce(x, label=name), lambda work: work.wait())

    def partial(stage: Stage) -> Stage:
        def fn(params: Any, x: Tensor, **consts: Any) -> tuple[Tensor, ...]:
            (y,) = stage.fn(params, x, **consts)  # x plus this rank's part
            # 1/n of x plus this rank's part: the sum over ranks has x once. (In 16 bits, subtract before the residual is added.)
            return (y - x * (1 - 1 / axis.size),)

        return dataclasses.replace(stage, fn=fn, key=(stage.key, "tensor_parallel", axis.size), partial_over=(axis,))

    def around(stage: Stage) -> list[Stage | Exchange]:
        """Before the stage: x as it is, gradients summed. After it: outputs summed, gradients as they are."""
        enter, leave = total(f"{stage.name}.enter"), total(f"{stage.name}.leave")
        return [
            Exchange(
                f"{stage.name}.enter",
                ("x",),
                ("x",),
                forward=Transfer(lambda reads: reads, lambda reads: (reads, None)),
                backward=Transfer(lambda given: enter.start(given[1][0]), lambda work: (enter.wait(work),)),
            ),
            partial(stage),
            Exchange(
                f"{stage.name}.leave",
                ("x",),
                ("x",),
                forward=Transfer(lambda reads: leave.start(reads[0]), lambda work: ((leave.wait(work),), None)),
                backward=Transfer(lambda given: given[1], pass_on.wait),
            ),
        ]

    def rewrite(step: TrainStep, program: Program) -> Program:
        return tuple(new for node in program for new in (around(node) if isinstance(node, Stage) and node.kind in KINDS else [node]))

    def transform(step: TrainStep) -> TrainStep:
        heads = step.model.config.num_key_value_heads
        if heads % axis.size:
            raise ValueError(f"tensor_parallel: {heads} key-value heads do not divide over {axis.name}={axis.size}")
        owned = dict(step.owned) | {"heads": axis, "kv_heads": axis, "mlp": axis}
        return step.replace(f"tensor_parallel({axis.name}={axis.size})", owned=owned, rewrites=(*step.rewrites, rewrite))

    return transform


def main() -> None:
    model = xtf.testing.small_models()["qwen3"]
    print(*xtf.testing.check(lambda mesh: tensor_parallel(mesh["tensor"]), model=model, tensor=2))
    both = lambda mesh: xtf.compose(shard(mesh["data"]), tensor_parallel(mesh["tensor"]), chunk_loss(tokens=7))  # noqa: E731
    print(*xtf.testing.check(both, model=model, data=3, tensor=2))

    def account(mesh: xtf.Mesh) -> str:
        return repr(both(mesh)(xtf.train_step(model, xtf.optim.adamw(lr=1e-3))))

    print(xtf.simulate(account, data=3, tensor=2)[0])


if __name__ == "__main__":
    main()
