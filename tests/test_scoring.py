"""Scorers with right, wrong and tricky answers."""

import pytest

from vllm_novakv.evaluation.math_answers import extract_math_answer, is_equal_math
from vllm_novakv.evaluation.scoring import METRICS, choice_score, extract_choice, math_score, needle_recall


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        pytest.param("The number is 4170932.", ("4170932",), 1.0, id="right"),
        pytest.param("The number is 4170933.", ("4170932",), 0.0, id="wrong"),
        pytest.param("AB12-cd", ("ab12-CD",), 1.0, id="case"),
        pytest.param("12 and ABC", ("12", "abc", "7", "8"), 0.5, id="half"),
        pytest.param("1, 2, 3 and 4", ("4", "3", "2", "1"), 1.0, id="order"),
        pytest.param("", ("1",), 0.0, id="empty"),
    ],
)
def test_needle_recall(answer, expected, score):
    assert needle_recall(answer, expected) == score


def test_needle_recall_without_gold_is_refused():
    with pytest.raises(ValueError, match="without expected"):
        needle_recall("x", ())


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        pytest.param("Answer: B", "B", id="plain"),
        pytest.param("Some thoughts.\n\n**Answer:** C", "C", id="bold"),
        pytest.param("answer: b", "B", id="lower"),
        pytest.param("Answer: (D).", "D", id="brackets"),
        pytest.param("Answer: $A$", "A", id="dollar"),
        pytest.param("So the answer is \\boxed{C}.", "C", id="boxed"),
        pytest.param("Therefore \\boxed{\\text{B}}", "B", id="boxed-text"),
        pytest.param("The correct answer is B, since A is too small.", "B", id="is"),
        pytest.param("The correct answer is A because B is too small.", "A", id="is-a-because"),
        pytest.param("Answer: A? No, wait.\nAnswer: D", "D", id="last-counts"),
        pytest.param("B", "B", id="letter"),
        pytest.param(" (c). ", "C", id="bracketed-letter"),
        pytest.param("B) 4 metres", "B", id="leading"),
        pytest.param("Final answer to the question: C", "C", id="far-colon"),
        pytest.param("The answer is A good question.", None, id="article"),
        pytest.param("Answer: a difficult one", None, id="article-after-colon"),
        pytest.param("Answer: Because of gravity", None, id="word"),
        pytest.param("A is wrong, B is wrong, all are wrong", None, id="mentions"),
        pytest.param("I cannot say.", None, id="refusal"),
        pytest.param("", None, id="empty"),
    ],
)
def test_extracted_letter(answer, letter):
    assert extract_choice(answer) == letter


def test_choice_score():
    assert choice_score("Answer: B", ("B",)) == 1.0
    assert choice_score("Answer: B", ("A",)) == 0.0
    assert choice_score("no idea", ("A",)) == 0.0


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        pytest.param("so \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", id="boxed"),
        pytest.param("first \\boxed{1}, then \\boxed{x^{2}}.", "x^{2}", id="last-box"),
        pytest.param("The answer is 7.", "7", id="sentence"),
        pytest.param("**Answer: 7**", "7", id="bold"),
        pytest.param("3 + 4 = 7", "7", id="last-number"),
        pytest.param("It costs 1,250 in all", "1,250", id="thousands"),
        pytest.param("I give up", None, id="none"),
        pytest.param("never closed \\boxed{3", "3", id="unclosed"),
    ],
)
def test_extracted_math_answer(solution, answer):
    assert extract_math_answer(solution) == answer


@pytest.mark.parametrize(
    ("left", "right", "is_equal"),
    [
        pytest.param("7", "7", True, id="same"),
        pytest.param("7", "8", False, id="different"),
        pytest.param("0.5", "\\frac{1}{2}", True, id="decimal"),
        pytest.param("\\dfrac12", "1/2", True, id="short-fraction"),
        pytest.param("x = 5", "5", True, id="named"),
        pytest.param("1,250", "1250", True, id="thousands"),
        pytest.param("\\$18", "18", True, id="currency"),
        pytest.param("50\\%", "50", True, id="percent"),
        pytest.param("45^\\circ", "45", True, id="degrees"),
        pytest.param("3\\sqrt{2}", "\\sqrt{18}", True, id="roots"),
        pytest.param("\\frac{\\sqrt{3}}{2}", "sqrt(3)/2", True, id="nested"),
        pytest.param("2\\pi r", "2πr", True, id="pi"),
        pytest.param("(x+1)^2", "x^2+2x+1", True, id="polynomials"),
        pytest.param("(x+1)^2", "x^2+2x+2", False, id="other-polynomial"),
        pytest.param("(1, 2)", "(1,2)", True, id="tuple"),
        pytest.param("(1,250)", "(1, 250)", True, id="tuple-not-thousands"),
        pytest.param("(1, 0.5)", "(1,\\frac12)", True, id="tuple-parts"),
        pytest.param("(2, 1)", "(1, 2)", False, id="tuple-order"),
        pytest.param("[1, 2)", "(1, 2)", False, id="interval-ends"),
        pytest.param("(1, 2)", "(1, 2, 3)", False, id="tuple-length"),
        pytest.param("\\text{Monday}", "Monday", True, id="text"),
        pytest.param("-3", "3", False, id="sign"),
        pytest.param("0.333", "1/3", False, id="rounded"),
        pytest.param("", "", False, id="empty"),
        pytest.param("9^{9^{9^9}}", "1", False, id="overflow"),
        pytest.param("1/0", "1", False, id="division"),
        pytest.param("__import__('os').getcwd()", "1", False, id="code"),
    ],
)
def test_math_equality(left, right, is_equal):
    assert is_equal_math(left, right) is is_equal
    assert is_equal_math(right, left) is is_equal


def test_math_score_takes_any_gold():
    assert math_score("Thus \\boxed{0.25}.", ("\\frac14",)) == 1.0
    assert math_score("Thus \\boxed{0.26}.", ("\\frac14", "0.26")) == 1.0
    assert math_score("Thus \\boxed{0.27}.", ("\\frac14", "0.26")) == 0.0
    assert math_score("no number", ("1",)) == 0.0


def test_every_metric_has_a_scorer():
    assert set(METRICS) == {"needle_recall", "choice", "math"}
