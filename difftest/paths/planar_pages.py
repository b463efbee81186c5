"""Paged caches whose page holds the data rows of all its tokens first and their scale rows after them."""

from dataclasses import dataclass

import torch
from torch import Tensor

POISON = 0xFF
"""Byte of memory nothing was written to: NaN as e4m3, as ue8m0, as bf16 and as fp32."""


@dataclass(frozen=True)
class PlanarPages:
    """Byte layout of one page: `page_size` data rows, then `page_size` scale rows, then padding up to `align` bytes."""

    page_size: int
    data_bytes: int
    scale_bytes: int
    align: int = 1

    @property
    def page_bytes(self) -> int:
        used = self.page_size * (self.data_bytes + self.scale_bytes)
        return -(-used // self.align) * self.align

    def poisoned(self, pages: int, device: torch.device | str = "cpu") -> Tensor:
        """A pool that nothing was written to: uint8 [pages, page_bytes], every byte `POISON`."""
        return torch.full((pages, self.page_bytes), POISON, dtype=torch.uint8, device=device)

    def rows(self, pool: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a pool: data [pages, page_size, data_bytes] and scales [pages, page_size, scale_bytes], uint8."""
        end = self.page_size * self.data_bytes
        data = pool[:, :end].view(-1, self.page_size, self.data_bytes)
        scales = pool[:, end : end + self.page_size * self.scale_bytes]
        return data, scales.view(-1, self.page_size, self.scale_bytes)

    def write(self, pool: Tensor, slots: Tensor, data: Tensor, scales: Tensor) -> None:
        """Writes rows at `slots` int64 [n]; data uint8 [n, <= data_bytes], scales uint8 [n, <= scale_bytes]."""
        data_rows, scale_rows = self.rows(pool)
        page, offset = slots // self.page_size, slots % self.page_size
        data_rows[page, offset, : data.shape[1]] = data
        scale_rows[page, offset, : scales.shape[1]] = scales

    def read(self, pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Rows at `slots` int64 [n]: data uint8 [n, data_bytes], scales uint8 [n, scale_bytes]."""
        data_rows, scale_rows = self.rows(pool)
        page, offset = slots // self.page_size, slots % self.page_size
        return data_rows[page, offset], scale_rows[page, offset]
