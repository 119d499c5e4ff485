"""Whole models, from published configurations, with random weights: nothing is downloaded."""
