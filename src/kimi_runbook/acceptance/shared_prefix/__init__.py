"""The parts of step 3: the prompts, sending them, the witnesses, and what they are compared with."""
