"""Any number of GPUs and machines: devices of workers, memory, builds, shards, budgets, merging, clusters."""
