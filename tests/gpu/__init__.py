"""What Stator has to do on an NVIDIA GPU; skipped where there is none."""
