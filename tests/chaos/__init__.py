"""Everything that can go wrong is made to go wrong; nothing is left, and nothing is lost."""
