"""Tests of the passes over each half of a joint graph."""
