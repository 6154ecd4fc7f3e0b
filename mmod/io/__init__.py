"""Files, YAML, configs, stores, records, tables and tensors; jobs, processes, signals, progress bars and refusals."""
