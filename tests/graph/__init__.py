"""Tests of the machinery over graphs."""
