"""The layer between a run and its machine: errors, files, devices, processes, models, checkpoints, runs."""
