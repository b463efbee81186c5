"""Robustness of kernels: the same bits every time, in any batch, whatever lies in memory that they may not use."""
