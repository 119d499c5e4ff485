"""Tests of the native executor."""
