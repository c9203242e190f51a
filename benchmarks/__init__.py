"""Benchmarks: each prints lines `NAME ratio X.XX` (above 1: mindferry better) and writes JSON beside them."""
