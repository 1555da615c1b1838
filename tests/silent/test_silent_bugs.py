"""Bugs that others shipped without an error, each as a case: that it does not happen here, and that it would be noticed if it did."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.silent import counting, gradients, routing, stored  # noqa: F401  (they enter their cases)
from tests.silent.record import CASES, Case
from xtf.testing import LawError

EVERY = pytest.mark.parametrize("case", CASES, ids=str)


@EVERY
def test_holds(case: Case) -> None:
    """The real code passes the check."""
    case.check()


@EVERY
def test_caught(case: Case) -> None:
    with case.fault(), pytest.raises(LawError) as error:
        case.check()
    message = str(error.value)
    for pattern in case.says:
        assert re.search(pattern, message, re.M), f"expected {pattern!r} in\n{message}"
    for pattern in case.right:
        assert not re.search(pattern, message, re.M), f"did not expect {pattern!r} in\n{message}"


test_caught.__doc__ = "Each fault, put in by hand, is noticed and for what it is:\n\n" + "\n".join(
    f"* {case.name}: {case.mutation}" for case in CASES
)


def test_the_page_lists_every_case() -> None:
    page = (Path(__file__).parents[2] / "docs" / "silent_bugs.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]*) \| [^|]+ \|$", page, re.M))
    assert rows.pop("what others shipped") == "reported, for example, in"
    reported = {name: re.findall(r"https://github.com/([^)]+)/issues/(\d+)\)", links) for name, links in rows.items()}
    assert reported == {case.name: [tuple(one.split("#")) for one in case.reported] for case in CASES}
    assert all(case.mutation and case.says for case in CASES) and len(rows) == len(CASES)
