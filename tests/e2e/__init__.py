"""Whole runs through the command line, on simulated engines in real time."""
