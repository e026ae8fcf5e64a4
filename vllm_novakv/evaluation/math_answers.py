r"""Final answers of mathematical problems: find them in a solution, and decide whether two of them are equal.

Equality is decided on the text after tidying LaTeX, and else on numbers: both sides are evaluated, variables at fixed
points. It is narrower than a computer algebra system (sets, intervals with ±, matrices and equations are compared as
text), and it never runs what a model wrote: expressions are parsed, and only arithmetic is carried out.

Source: engineering choice; arXiv 2608.04074, section 8.1 uses the math-verify library.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?|-?\.\d+")
_ANSWER_LINE = re.compile(r"answer\s*(?:is|:|=)+\s*(.+)", re.IGNORECASE)
_FRACTION_PAIR = re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)")
_WRAPPERS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_IGNORED = re.compile(r"\\left|\\right|\\[!,;:]|\\ |\\?[$%]|°|\^\s*\{?\\circ\}?|\\(?:deg|degree)\b")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
# sample points for variables: no small rational relation holds between them
_POINTS = (0.7390851332, 1.3247179572, 2.6854520010)
_RELATIVE_TOLERANCE = 1e-9
_MAX_EXPRESSION_CHARACTERS = 300

_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}


def extract_math_answer(solution: str) -> str | None:
    r"""The final answer of a solution: the last \boxed{…}, else the text after the last "answer is", else a number.

    The number is the last one of the solution.

    Example: "so \boxed{\frac{1}{2}}" gives "\frac{1}{2}"; "The answer is 7." gives "7"; "3 + 4 = 7" gives "7".

    Args:
        solution: what the model said.

    Returns:
        The answer's text, or None if there is none.
    """
    boxed = _last_boxed(solution)
    if boxed is not None:
        return boxed
    lines = _ANSWER_LINE.findall(solution)
    if lines:
        return str(lines[-1]).strip().rstrip(".").strip("*").strip()
    numbers = _NUMBER.findall(solution)
    return str(numbers[-1]) if numbers else None


def is_equal_math(found: str, expected: str) -> bool:
    r"""Whether two final answers mean the same.

    Example: "\dfrac12", "0.5", "1/2" and "x = \frac{1}{2}" are equal; "(1, 2)" and "(2, 1)" are not.

    Args:
        found: the model's answer.
        expected: the gold answer.

    Returns:
        True if the tidied texts are the same, or if both can be evaluated and agree to 1e-9 at every sample point;
        tuples agree part by part.
    """
    left, right = _tidy(found), _tidy(expected)
    if left == right:
        return bool(left)
    left_parts, right_parts = _split_tuple(left), _split_tuple(right)
    if len(left_parts) != len(right_parts):
        return False
    if len(left_parts) > 1:
        # (1, 2) is not [1, 2]
        return left[0] + left[-1] == right[0] + right[-1] and all(map(is_equal_math, left_parts, right_parts))
    for point in _POINTS:
        values = _evaluate(left, point), _evaluate(right, point)
        if values[0] is None or values[1] is None:
            return False
        if not math.isclose(values[0], values[1], rel_tol=_RELATIVE_TOLERANCE, abs_tol=1e-12):
            return False
    return True


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    first = start + len("\\boxed{")
    for position in range(first - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[first:position].strip()
    return None


def _tidy(text: str) -> str:
    text = _IGNORED.sub("", text.strip()).replace("−", "-")
    text = _WRAPPERS.sub(r"\1", text)
    # in (1,250) the comma separates
    if not text.lstrip().startswith(("(", "[")):
        text = _THOUSANDS.sub("", text)
    text = _FRACTION_PAIR.sub(r"\\frac{\1}{\2}", text)
    text = text.strip().rstrip(".")
    # "x = 5" says 5; an equation with two sides of its own is compared as it stands
    name, equals, value = text.partition("=")
    if equals and re.fullmatch(r"\s*[A-Za-z]\s*", name):
        text = value
    return re.sub(r"\s+", "", text)


def _split_tuple(text: str) -> list[str]:
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return [text]
    parts, depth, start = [], 0, 1
    for position, sign in enumerate(text[:-1]):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0:
            # "(a)(b)": the first bracket closes before the end, so this is no tuple
            return [text]
        if sign == "," and depth == 1:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:-1]] if parts else [text]


def _evaluate(text: str, point: float) -> float | None:
    """Value of an expression with every variable at a point of its own near `point`; None if it is not one."""
    if not text or len(text) > _MAX_EXPRESSION_CHARACTERS:
        return None
    try:
        value = _value(ast.parse(_to_python(text), mode="eval").body, point)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return None
    return value if math.isfinite(value) else None


def _to_python(text: str) -> str:
    previous = ""
    # innermost first: a replacement leaves no braces behind
    while previous != text:
        previous = text
        text = re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
        text = re.sub(r"\\sqrt\[(\d+)\]\{([^{}]*)\}", r"((\2)**(1/\1))", text)
        text = re.sub(r"\\sqrt\{([^{}]*)\}", r"((\1)**(1/2))", text)
        text = re.sub(r"\\?sqrt\(([^()]*)\)", r"((\1)**(1/2))", text)
        text = re.sub(r"\^\{([^{}]*)\}", r"**(\1)", text)
    text = re.sub(r"\\sqrt(\d)", r"(\1**(1/2))", text)
    text = text.replace("\\cdot", "*").replace("\\times", "*").replace("\\div", "/").replace("^", "**")
    text = text.replace("\\pi", "π").replace("π", "(π)")
    # products without a sign: 2x, xy, 2(x), (x)y, (x)(y), x(y)
    text = re.sub(r"(?<=[\dA-Za-z)])(?=[A-Za-z(])", "*", text)
    return re.sub(r"(?<=\))(?=\d)", "*", text)


def _value(node: ast.expr, point: float) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.Name) and len(node.id) == 1:
        return math.pi if node.id == "π" else point + ord(node.id) / 1000
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        operand = _value(node.operand, point)
        return -operand if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, point), _value(node.right, point))
    raise ValueError(f"not an arithmetic expression: {ast.dump(node)}")
