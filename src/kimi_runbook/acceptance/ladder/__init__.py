"""The parts of step 4: the rungs, one rung driven, its figures, its checks, and the knee."""
