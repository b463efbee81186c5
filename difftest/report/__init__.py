"""Reports: one module a format. Each reads an `Outcome` or a run directory and writes nothing else."""
