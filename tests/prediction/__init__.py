"""Tests of calibration and prediction."""
