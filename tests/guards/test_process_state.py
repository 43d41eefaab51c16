"""Environment, context variables and settings are attributes: one object until they change."""

import contextvars

import pytest

from ortmodule.guards.process_state import ENVIRONMENT, of_context, of_setting

NAME = "ORTMODULE_TEST_OF_PROCESS_STATE"


def test_environment(monkeypatch):
    assert getattr(ENVIRONMENT, NAME) is None
    monkeypatch.setenv(NAME, "a value")
    found = getattr(ENVIRONMENT, NAME)
    assert found == b"a value" and getattr(ENVIRONMENT, NAME) is found
    monkeypatch.setenv(NAME, "another")
    assert getattr(ENVIRONMENT, NAME) == b"another"


def test_context_variables():
    variable = contextvars.ContextVar("depth")
    held = of_context(variable)
    assert of_context(variable) is held and held.__name__ == "the context variable depth"
    assert held.value is variable  # it holds nothing
    token = variable.set(3)
    assert held.value == 3
    assert contextvars.Context().run(lambda: held.value) is variable
    variable.reset(token)
    assert held.value is variable


def test_settings():
    values = [[1], [1], [2], [True], [1]]
    setting = of_setting(lambda: values[0])
    first = setting.value
    values.pop(0)
    assert setting.value is first  # an equal one
    values.pop(0)
    assert setting.value == [2] and setting.value is not first


def test_a_setting_of_another_type_is_another():
    values = [1, True]
    setting = of_setting(lambda: values[0])
    assert setting.value == 1
    values.pop(0)
    assert setting.value is True


def test_an_error_instead():
    assert of_setting(int, ("x",)).value is ValueError


def test_one_object_for_a_call():
    assert of_setting(int, ("3",)) is of_setting(int, ("3",)) and of_setting(int, ("4",)).value == 4
    with pytest.raises(TypeError):
        of_setting(int, ([],))
