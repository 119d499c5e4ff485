"""Tests of the passes over the graph that Dynamo captured."""
