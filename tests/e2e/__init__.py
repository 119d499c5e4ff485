"""Whole models: trained, inferred with, optimised, at changing sizes, in bounded memory."""
