"""The ways a run ends early; the command line turns each into one message and an exit code."""


class UserError(Exception):
    """Something the user can change: bad flags, data, files or weights. Exit code 2.

    The message says what was being done, what was found, what was expected and what to change.
    """


class Unserved(UserError):
    """A config that may well be right, of a model that no structured family describes: the generic stage may."""


class RunStopped(Exception):
    """The run itself can't go on, such as a loss that is not a number. Exit code 1."""
