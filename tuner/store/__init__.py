"""The run folder: atomic writes, versioned reads."""
