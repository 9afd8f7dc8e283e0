"""Between a run and its machine: programs and processes (without PyTorch), devices, checkpoints, runs."""
