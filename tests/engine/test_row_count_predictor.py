"""Numbers are expected where the last steps of a kind had the same, and kinds are forgotten by age."""

from ortmodule.engine.row_count_predictor import STEADY, Counts


def learnt(counts, step, *numbers):
    for number in numbers:
        counts.learn(step, (number,))


def test_it_takes_several_steps():
    counts = Counts(4)
    for _ in range(STEADY):
        assert counts.expected("a") == ()
        counts.learn("a", (7, 2))
    assert counts.expected("a") == (7, 2)


def test_another_number_begins_anew():
    counts = Counts(4)
    learnt(counts, "a", *[7] * STEADY, 8)
    assert counts.expected("a") == ()
    learnt(counts, "a", *[8] * (STEADY - 1))
    assert counts.expected("a") == (8,)


def test_kinds_are_apart():
    counts = Counts(4)
    learnt(counts, "a", *[7] * STEADY)
    learnt(counts, "b", *[9] * (STEADY - 1))
    assert counts.expected("a") == (7,) and counts.expected("b") == ()


def test_the_kind_used_last_stays():
    counts = Counts(2)
    learnt(counts, "a", *[1] * STEADY)
    learnt(counts, "b", *[2] * STEADY)
    learnt(counts, "a", 1)
    learnt(counts, "c", *[3] * STEADY)
    assert (counts.expected("a"), counts.expected("b"), counts.expected("c")) == ((1,), (), (3,))
