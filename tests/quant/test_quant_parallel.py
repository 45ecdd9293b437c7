from __future__ import annotations

import pytest
import torch

from turbomill.quant.parallel import ROWS, ROWS_GPU, row_parts, spread, workers

CPU = torch.device("cpu")


def test_results_keep_their_order_and_threads_their_settings() -> None:
    before = torch.get_num_threads()
    seen = spread(lambda i: (i, torch.get_num_threads(), torch.is_grad_enabled()), range(20), CPU)
    assert [i for i, _, _ in seen] == list(range(20))
    assert not any(grad for _, _, grad in seen)
    if before > 1:
        assert {threads for _, threads, _ in seen} == {1}
    assert torch.get_num_threads() == workers(CPU) == before


def test_the_first_exception_is_raised() -> None:
    def fail(i: int) -> int:
        if i in (3, 7):
            raise ValueError(f"piece {i}")
        return i

    with pytest.raises(ValueError, match="piece 3"):
        spread(fail, range(10), CPU)


@pytest.mark.parametrize("rows", [1, 2, 7, 576, 2 * ROWS, 2 * ROWS + 1, 28672, 2 * ROWS_GPU + 3])
@pytest.mark.parametrize(("device", "most"), [("cpu", ROWS), ("cuda", ROWS_GPU)])
def test_row_parts_cover_every_row_once(rows, device, most) -> None:
    parts = row_parts(rows, torch.device(device))
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))
    assert all(part.stop - part.start <= most for part in parts)
    assert len(parts) <= -(-rows // most) + 1
