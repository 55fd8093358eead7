"""The one exception that a person who runs clearshard is meant to read."""


class RunError(Exception):
    """What is wrong, where, what was expected and the fix. The entry point prints it alone, without a traceback, and exits with 1."""
