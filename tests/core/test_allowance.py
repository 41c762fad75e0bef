"""So many within a minute, and not one more."""

from kvcm.core.allowance import PERIOD_S, Allowance


def test_the_limit_holds_over_any_split_and_begins_anew_after_the_period() -> None:
    allowance = Allowance(10)
    assert [allowance.take(wanted, 5.0) for wanted in (0, 4, 6, 1, 0)] == [0, 4, 6, 0, 0]
    assert allowance.take(1, 5.0 + PERIOD_S - 0.001) == 0
    assert allowance.take(11, 5.0 + PERIOD_S) == 10
    assert allowance.take(1, 5.0 + PERIOD_S) == 0


def test_the_period_begins_with_the_first_that_is_taken() -> None:
    allowance = Allowance(1)
    assert allowance.take(1, 59.0) == 1
    assert allowance.take(1, 61.0) == 0


def test_what_is_given_back_can_be_taken_again() -> None:
    allowance = Allowance(3)
    assert allowance.take(3, 0.0) == 3
    allowance.give_back(2)
    assert allowance.take(3, 1.0) == 2
    allowance.give_back(99)
    assert allowance.take(9, 2.0) == 3
