"""The training loop and what every kind of run shares: folders, checkpoints, logging, processes, configs."""
