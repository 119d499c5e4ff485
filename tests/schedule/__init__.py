"""Tests of the way from loops to kernels."""
