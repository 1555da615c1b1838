"""The checks of `shapes` are on, find what is wrong, and leave alone what they must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import beartype
import jaxtyping
import pytest
import shapes
import torch
from jaxtyping import Float
from torch import Tensor

from xtf.models.common import rms_norm
from xtf.models.rope import rotate


def add(x: Float[Tensor, "T H"], y: Float[Tensor, " H"]) -> Float[Tensor, "T H"]:
    return x + y


def wrong_out(x: Float[Tensor, "T H"]) -> Float[Tensor, " T"]:
    return x.sum(0)


def refuses(x: Float[Tensor, "T H"], fail: bool) -> Float[Tensor, "T H"]:
    if x.dim() != 2 and fail:
        raise ValueError("refused")
    return x.sum(0)[None]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", False)
    return shapes._checked(typechecker=beartype.beartype)  # pyright: ignore[reportPrivateUsage]


def test_xtf_is_checked() -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="rms_norm"):
        rms_norm(torch.ones(3, 4), torch.ones(1), 1e-5)  # would broadcast, and give something
    with pytest.raises(jaxtyping.TypeCheckError, match="rotate"):
        rotate(torch.ones(3, 2, 4), torch.ones(3, 1), torch.ones(3, 1))


def test_arguments_and_results_are_checked_again_for_other_shapes(checked: Callable[[Any], Any]) -> None:
    fn = checked(add)
    for _ in range(2):
        assert fn(torch.ones(2, 3), torch.ones(3)).shape == (2, 3)
    for x, y in ((torch.ones(2, 3), torch.ones(1)), (torch.ones(2, 3), torch.ones(3).long()), (torch.ones(3), torch.ones(3))):
        with pytest.raises(jaxtyping.TypeCheckError, match="parameters of"):
            fn(x, y)
    with pytest.raises(jaxtyping.TypeCheckError, match="return value"):
        checked(wrong_out)(torch.ones(2, 3))


def test_a_refusal_goes_through_and_nothing_else(checked: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="refused"):
        checked(refuses)(torch.ones(2), True)
    with pytest.raises(jaxtyping.TypeCheckError):
        checked(refuses)(torch.ones(2), False)
    with pytest.raises(jaxtyping.TypeCheckError):
        checked(refuses)("no tensor", False)


def test_dynamo_sees_the_function_itself(checked: Callable[[Any], Any]) -> None:
    compiled: Any = torch.compile(checked(add), backend="eager", fullgraph=True)
    assert compiled(torch.ones(2, 3), torch.ones(1)).shape == (2, 3)


def test_functions_without_shapes_are_left_as_they_are(checked: Callable[[Any], Any]) -> None:
    def plain(x: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        return x

    assert checked(plain) is plain
