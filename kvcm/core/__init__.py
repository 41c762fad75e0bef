"""Values and rules of the domain: no I/O, imports nothing of ours."""
