"""Parse and print; decide nothing."""
