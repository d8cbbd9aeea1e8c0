"""Functions as authors write tools, and what verifiers 0.2.0 made of them, in `tool_schemas.json`.

The schemas were made by running `convert_func_to_tool_def` of verifiers 0.2.0 on this file; those that are
null it refuses to make.
"""

# ruff: noqa
from __future__ import annotations

import enum, typing as t
from dataclasses import dataclass
from typing import Any, Annotated, Literal, Optional, Union
from typing_extensions import TypedDict
from pydantic import BaseModel, Field


class Point(BaseModel):
    """A point."""

    x: float
    y: float = Field(0.0, description="the y")


class Line(BaseModel):
    a: Point
    b: Optional[Point] = None
    tags: list[str] = []


class TD(TypedDict):
    name: str
    age: int


class TD2(TypedDict, total=False):
    a: str
    b: Optional[int]


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class DC:
    a: int
    b: str = "x"


def f01(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: First number.
        b: Second number.

    Returns:
        The sum.
    """


def f02(q: str, k: int = 5) -> str:
    "Search."


def f03(x: Optional[str] = None, y: str | None = None):
    """No types of return."""


def f04(mode: Literal["a", "b"] = "a", n: Union[int, str] = 3): ...
def f05(p: Point, line: Line) -> str:
    """Draw.

    Args:
        p (Point): the point to draw
        line: the line
    """


def f06(rows: list[TD], opt: TD2) -> str:
    """Rows.

    Parameters
    ----------
    rows : list of dict
        The rows to use.
    opt : dict
        Options
        on two lines.

    Returns
    -------
    str
        Nothing.
    """


def f07(a: str, b: float = 1.5) -> str:
    """Sphinx one.

    :param a: the a
    :type a: str
    :param b: the b
    :returns: nothing
    """


def f08(c: Color, d: DC):
    """Enums
    and a dataclass."""


def f09(a, b=2, *, c: bool = True):
    """Untyped."""


def f10(items: list[int], matrix: list[list[float]], t: tuple[int, str], s: set[str]):
    """Collections.

    Longer description
    over lines.

    Args:
        items: The items, with a long
            second line: and colon.
        matrix: M
    Raises:
        ValueError: never
    """


async def f11(url: str) -> str:
    """Async."""


def f12(a: Annotated[int, Field(description="annotated a", ge=0)], b: Annotated[str, "plain note"] = "x"):
    """Annotated."""


def f13():
    """No params."""


def f14(x: Any, y: object = None):
    """Anything."""


def f15(*args: int, flag: bool = False):
    """Var."""


def f16(code: str, timeout: float | None = 3.0, langs: list[Literal["py", "js"]] = ["py"]):
    """Run code.

    Examples:
        >>> f16("x")

    Args:
        code: code
        timeout: seconds
    """


def f17(p: Point | None = None, ps: list[Point] = []):
    """Opt model."""


def f18(a: int, b: str = Field("x", description="field default")):
    """Field default.

    Args:
        a: docs a
        b: docs b
    """


def f19(when: "t.Optional[list[str]]" = None) -> "str":
    """Leading space.

    Args:
    when: not indented
    """


def f20(a: int): ...


class Tools:
    def f21(self, a: int, b: str = "z"):
        """Method.

        Args:
            a: A.
        """

    @staticmethod
    def f22(a: int):
        """Static"""


f21 = Tools().f21
f22 = Tools.f22


def f23(u: Union[Point, TD], v: Literal[1, 2, "x"], w: int | float | None = None):
    """Unions."""


def f24(text: str, pattern: str) -> str:
    """
    First line here.
    Second line here.

    Note:
        something noted

    Args:
        text (str): The text
        pattern (str, optional): The pattern. Defaults to "".

    Returns:
        str: result
    """


def g01(d: dict[str, int]):
    """A dict."""


def g02(d: dict, e: Optional[dict[str, Any]] = None):
    """Dicts."""


def g03(kw: str, **kwargs):
    """Kwargs."""


def g04(items: list[dict]):
    """List of dicts."""


def n1(a: int, b: str = "x"):
    """Short.

    Long text.

    Parameters
    ----------
    a : int
        The a.
    b : str, optional
        The b,
        second line.
    """


def n2(a: int, b: str):
    """
    Do it.

    :param a: first
      continued here
    :param str b: second
    :return: x
    """


def n3(a: int):
    """Args:
    a: only args
    """


def n4(a: int, **kw):
    """Parameters:
    a: param alias
    """


def n5(a: int, b: int, c: int):
    """Thing.

    Arguments:
        a (int): A with type
        b(int): no space
        c - dash
        d: unknown
    Note: inline note
    After.
    """


def n6(a: int):
    """Summary

    Args:
      a: two space indent

    Example:
      >>> n6(1)

    Trailing prose paragraph.
    """


def n7(a: int, b: int):
    """Summary.

    Args:
        a: first

        b: after a blank line
    """


def n8(a: int):
    """Summary

    Raises:
        ValueError: x

    More prose after.

    Returns:
        int: y
    """


def n9(x: str):
    """Title.

    Attributes:
        z: attr

    Warning:
        Careful.
    Args:
        x: the x
    """


def n10(a: int):
    """Summary.
    Args:
        a: no blank above
    """


def n11(a: int):
    """Summary.

    Args:

        a: blank after header
    """


def n12(a: int):
    """Summary.

    Warning: title here
        indented body

    Args:
        a: yes
    """


def n13(a: int):
    """Summary: with colon
        indented more

    Args:
        a: yes
    """


def n14(a: int, b: int):
    """
    Multi
      indented text

    Args:
        a: one
            deeper
              deepest
        b: two
          odd
    Text after
    """


def n15(a: int, b: int):
    """Sphinx.

    More prose.

    :param int a: one
    :param b: two
        indented cont

    After prose
    :raises ValueError: x
    """


def n16(a: int, b: int):
    """Numpy.

    Returns
    -------
    int
        ret

    Parameters
    ----------
    a
        no type
    b : int
        two

        para
    Notes
    -----
    hello
    """


def n17(a: int):
    """Summary.
    Returns: int
    Args:
        a: hidden
    """


def n18(a: int):
    """Summary.

    Args:
        *a: starred
        **kw: k
    """


def n19(a: int, b: int):
    """Summary.

    Parameters:
        a: param colon alias
    Keyword Args:
        b: kw
    """


def n20(a: int):
    """Do it.

    Returns:
        x

    :param a: mixed
    """


def n21(a: int):
    """Indented start
        more

    Args:
        a (list[str], optional): typed: colon inside. Defaults to None
    """


ALL = {k: v for k, v in sorted(globals().items()) if k[0] in "fgn" and k[1:].isdigit()}
