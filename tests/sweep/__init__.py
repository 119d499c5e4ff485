"""Run every operator that torch describes through the backend and compare it with eager."""
