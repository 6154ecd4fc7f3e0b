"""Files: strict YAML and JSON in, whole files out, locked folders."""
