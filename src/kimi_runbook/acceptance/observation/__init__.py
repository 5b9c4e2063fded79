"""The parts of step 6: the watch, trends told from noise, and the checks."""
