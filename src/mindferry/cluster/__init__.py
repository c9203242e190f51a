"""Launch files for several hosts of Ascend devices: job (what is wanted) -> files (written) -> check (proved).

rank is what each process runs; the training itself is mindformers' own.
"""
