"""Tests of what the rest of the package stands on."""
