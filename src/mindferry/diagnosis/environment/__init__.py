"""The machine and the installation: does it fit together, and does a tiny model train on it."""
