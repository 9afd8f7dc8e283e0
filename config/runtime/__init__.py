"""The layer between a run and its machine: errors, devices, processes, checkpoints, logs."""
