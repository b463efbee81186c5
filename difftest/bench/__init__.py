"""`difftest bench`: the fp8 and bf16 index kernels side by side on a GPU."""
