"""Which loads a trial drives."""
