"""How we search: the machine, with its effects at the edges."""

__version__ = "0.1.0"
