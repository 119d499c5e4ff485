"""Tests of plans and of their executor."""
