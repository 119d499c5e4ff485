"""Tests of the way from graphs to loops."""
