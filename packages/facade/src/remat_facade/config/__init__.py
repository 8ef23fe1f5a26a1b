"""Planning options as typed values and as YAML."""
