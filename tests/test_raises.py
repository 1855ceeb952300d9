"""``raises`` fails where another error comes, also one of the same class."""

from __future__ import annotations

from unittest.mock import ANY

import pytest

from kvpagoda.errors import BadInput, KVPagodaError, LayoutError, SchemaError
from raises import raises

OTHERS = {
    "no figures": BadInput("text"),
    "another number": BadInput("text", needed=4, available=3, field="n"),
    "more": BadInput("text", needed=5, available=4, field="n"),
    "less": BadInput("text", needed=5, field="n"),
    "another field": BadInput("text", needed=5, available=3, field="m"),
    "a class below": SchemaError("text", needed=5, available=3, field="n"),
}


def test_the_error_itself_is_let_pass_and_returned() -> None:
    error = BadInput("text", needed=5, available=3, field="n")
    with raises(BadInput, needed=5, available=3, field="n") as caught:
        raise error
    assert caught.value is error
    with raises(BadInput, needed=ANY, available=3):
        raise error
    with raises(LayoutError, rule="size"):
        raise LayoutError.of("size", "text")


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_error_in_its_place_fails(other: KVPagodaError) -> None:
    with pytest.raises(AssertionError), raises(BadInput, needed=5, available=3, field="n"):
        raise other


def test_true_is_not_one() -> None:
    with pytest.raises(AssertionError), raises(BadInput, needed=1):
        raise BadInput("text", needed=True)


def test_errors_of_other_classes_go_on() -> None:
    with pytest.raises(ValueError, match="text"), raises(BadInput, needed=5):
        raise ValueError("text")


def test_no_error_fails() -> None:
    with pytest.raises(pytest.fail.Exception), raises(BadInput, needed=5):
        pass


def test_something_must_be_compared() -> None:
    with pytest.raises(TypeError, match="give a figure"), raises(BadInput):
        raise BadInput("text", needed=5)
