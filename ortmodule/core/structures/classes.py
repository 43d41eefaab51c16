"""Tells classes that a program has made by class statements from those of Python and extensions."""

_HEAP_TYPE = 1 << 9  # in a class's flags: it was made while the program ran


def is_made_by_statement(cls: type) -> bool:
    """Is a class made by a class statement, and not by an extension?"""
    return bool(cls.__flags__ & _HEAP_TYPE)
