"""What follows a closure runs after each of its calls; a step without one stays as it is."""

from ortmodule.runtime.calls.closures import followed


def closure(scale=1):
    """What an optimizer calls."""
    return 3.0 * scale


def test_a_step_without_a_closure():
    optimizer = print  # it may be callable itself
    assert followed(optimizer, (optimizer, None), {"grad": 2}, lambda: None) is None


def test_after_each_call():
    ran = []
    args, kwargs = followed("optimizer", ("optimizer", closure), {"other": 2}, lambda: ran.append(1))
    assert args[0] == "optimizer" and kwargs == {"other": 2} and ran == []
    assert args[1]() == 3.0 and args[1](scale=2) == 6.0 and ran == [1, 1]
    assert args[1].__doc__ == closure.__doc__


def test_a_closure_with_a_name():
    ran = []
    _, kwargs = followed("optimizer", (), {"closure": closure}, lambda: ran.append(1))
    assert kwargs["closure"]() == 3.0 and ran == [1]


def test_nothing_follows_an_error():
    ran = []

    def fails():
        raise ValueError("of the script")

    args, _ = followed("optimizer", (fails,), {}, lambda: ran.append(1))
    try:
        args[0]()
    except ValueError:
        ran.append("error")
    assert ran == ["error"]
