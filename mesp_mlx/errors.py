"""The two ways a run ends early; the command line turns each into one message and an exit code."""


class UserError(Exception):
    """Something the user can change: bad flags, data, files or weights. Exit code 2.

    The message says what was being done, what was found, what was expected and what to change.
    """


class RunStopped(Exception):
    """The run itself can't go on, such as a loss that is not a number. Exit code 1."""
