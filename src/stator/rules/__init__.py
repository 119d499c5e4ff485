"""Rules: local rewrites, one equation each, by theme."""
