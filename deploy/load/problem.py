"""What keeps a load from being sent: the one error of this package."""


class LoadError(Exception):
    """An address, an option or the machine cannot be used as asked; the message is fit for a user to read."""
