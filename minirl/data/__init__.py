"""Training data: files of rows in, batches of a Rollout out."""
