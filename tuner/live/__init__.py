"""Live retuning: the scheduler class of a measured engine, and the tuner's end of its channel."""
