"""A small real source and the whole road with it: what `make demo` runs."""
