"""lm-evaluation-harness in process: our engine as its model, and three tasks that need no download."""
