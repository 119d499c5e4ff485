"""Tests of how a joint graph is cut in two."""
