"""Tests of stator."""
