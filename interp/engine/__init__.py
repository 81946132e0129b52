"""The imperative shell: batches, passes, generation, runs and their records."""
