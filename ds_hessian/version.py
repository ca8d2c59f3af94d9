"""Version of this package, for records."""

__version__ = "0.1.0"
