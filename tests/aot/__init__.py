"""Tests of the ahead-of-time autograd, by theme."""
