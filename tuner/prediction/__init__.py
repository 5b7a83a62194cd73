"""What a probe would show, without an engine: calibration, simulation, prediction."""
