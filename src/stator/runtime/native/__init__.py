"""The native executor: a plan as one function of machine code that Python calls."""
