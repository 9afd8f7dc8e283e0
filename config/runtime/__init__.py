"""Between a run and its machine: programs (without PyTorch), devices, checkpoints, runs."""
