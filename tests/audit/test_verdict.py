"""When answers differ, and when that is a finding."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from kvpagoda.audit.server import ServerAnswer
from kvpagoda.audit.verdict import (
    CHANCE,
    ERROR,
    LEAST,
    MOST_ROUNDING,
    RATIO,
    Noise,
    distance,
    evidence,
    is_sure,
    rounding_step,
)


def answer(*tops: dict[str, float]) -> ServerAnswer:
    tokens = tuple(max(top, key=top.__getitem__) for top in tops)
    return ServerAnswer("".join(tokens), tokens, tops)


def test_the_distance_is_that_of_the_first_tokens_as_long_as_they_are_the_same() -> None:
    one = answer({"a": -1.0, "b": -2.0}, {"c": -1.0, "d": -1.5}, {"e": -1.0})
    assert distance(one, one) == (0.0, 0)
    near = answer({"a": -1.0, "b": -2.2}, {"c": -1.0, "d": -1.5}, {"e": -1.0})
    assert distance(one, near) == (pytest.approx(0.2 / math.sqrt(2)), 1)
    other = answer({"a": -1.0, "b": -2.0}, {"c": -1.5, "d": -1.0}, {"e": -9.0})
    assert distance(one, other) == (pytest.approx(0.5), 2)  # the third follows other tokens


def test_a_token_that_one_side_does_not_show_differs_by_what_is_known() -> None:
    one, other = answer({"a": -1.0, "b": -4.0}), answer({"a": -1.0, "c": -2.0})
    assert distance(one, other)[0] == pytest.approx(math.sqrt(2.0**2 / 3))  # c is -4 or less on the left
    assert distance(answer({"a": math.nan}), answer({"a": -1.0}))[0] == 20.0


def test_without_log_probabilities_texts_are_compared() -> None:
    assert distance(ServerAnswer("abc", ("abc",)), ServerAnswer("abc", ("abc",))) == (0.0, 0)
    assert distance(ServerAnswer("abc", ("abc",)), ServerAnswer("abd", ("abd",))) == (1.0, 3)


def test_the_limit_follows_the_noise() -> None:
    assert Noise([0.0]).limit == MOST_ROUNDING
    assert Noise([0.0], [0.0]).limit == LEAST
    assert Noise([0.0], [0.02, 0.04]).limit == RATIO * 0.04
    assert Noise([0.0], beside=[0.2]).limit == pytest.approx(RATIO * 0.2)
    assert Noise([0.0], beside=[5.0]).limit == RATIO * MOST_ROUNDING  # what is beside a run may have spoiled it
    assert (
        Noise([0.0], [1e-5]).of_crowds.limit == MOST_ROUNDING
    )  # steps with others in them round otherwise, now and then
    assert Noise([0.0], [0.5]).of_crowds.limit == RATIO * 0.5
    assert Noise([0.0, 1.0, 0.0], by_tokens=True).limit == 0.5
    assert Noise([0.0, 1.0, 0.0], by_tokens=True).chance == 2 / 5


@pytest.mark.parametrize(("bits", "step"), [(8, Fraction(1, 32)), (11, Fraction(1, 256)), (24, 0)])
def test_the_step_is_that_of_the_logits(bits: int, step: float) -> None:
    """Logits between 4 and 8 with 8 bits, as in bfloat16, with 11, as in float16, and with those of float32."""
    draw, tops = np.random.default_rng(4), []
    for _ in range(9):
        logits = np.round(draw.uniform(4, 8, 20) * 2.0 ** (bits - 3)) / 2.0 ** (bits - 3)
        shown = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
        tops.append({str(token): float(one) for token, one in enumerate(shown)})
    assert rounding_step(answer(*tops)) == step
    assert rounding_step(answer(*({token: top[token] for token in ("0", "1", "2")} for top in tops))) == 0, "too few"
    assert rounding_step(answer({"a": 0.0, "b": -math.inf, "c": -math.inf, "d": -math.inf})) == 0
    assert rounding_step(ServerAnswer("", (), ())) == 0


def test_the_limit_is_over_some_steps() -> None:
    assert Noise([0.0], [0.0], steps=[1 / 32] * 3).limit == RATIO / 32
    assert Noise([0.0], [0.1], steps=[1 / 32] * 3).limit == RATIO * 0.1
    assert Noise([0.0], [0.0], steps=[1.0] * 3).limit == MOST_ROUNDING
    assert Noise([0.0], [0.0], steps=[0.0, 0.0, 0.5]).limit == LEAST


def test_one_wrong_answer_is_never_a_finding() -> None:
    noise = Noise([0.0], [1e-6])
    assert not is_sure([20.0], 0, noise)
    assert is_sure([0.5, 0.5], 0, noise)
    assert is_sure([0.5, 0.5], 150, noise)  # a rare fault, far over the noise
    assert not is_sure([1.1 * LEAST, 1.1 * LEAST], 10, noise)  # near the noise it takes more
    assert is_sure([1.1 * LEAST] * 6, 4, noise)
    assert evidence([], 50, noise) < 1


def test_without_a_fault_nothing_is_found() -> None:
    """Answers are wrong by chance as often as is taken for possible, by distances that fall with the third power."""
    draw, noise, found = random.Random(3), Noise([0.0], [0.1]), 0
    for _ in range(2000):
        wrong, right = list[float](), 0
        for _ in range(150):
            if draw.random() < CHANCE:
                wrong.append(noise.limit * (1 - draw.random()) ** (-1 / 3))
            else:
                right += 1
            if is_sure(wrong, right, noise):
                found += 1
                break
    assert found <= 2000 * ERROR * 10


def test_by_tokens_more_is_needed_where_cold_runs_differ() -> None:
    quiet, loud = Noise([0.0] * 20, by_tokens=True), Noise([0.0, 1.0] * 10, by_tokens=True)
    assert is_sure([1.0] * 8, 0, quiet) and not is_sure([1.0] * 8, 0, loud)
