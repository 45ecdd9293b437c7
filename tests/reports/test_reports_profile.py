"""What `bench_gpu.profile` computes from the kernels that ran."""

from __future__ import annotations

import pytest

from turbomill.reports.bench_gpu.profile import Kernel, busy_ns, idle_us_per_step, short_name


def test_time_in_which_kernels_overlap_counts_once() -> None:
    kernels = [Kernel("b", 3, 9), Kernel("a", 0, 5), Kernel("inside", 4, 6), Kernel("c", 20, 21)]
    assert busy_ns(kernels) == 10
    assert busy_ns(kernels, begin=4) == 6


def test_idle_time_is_of_steps_after_the_first() -> None:
    prompt = [Kernel("linear", 0, 1000), Kernel("a::choose_kernel<1>", 5000, 6000)]
    steps = [
        Kernel(name, start, start + 1000)
        for step in (8000, 18000)
        for name, start in (("linear", step), ("a::choose_kernel<1>", step + 3000))
    ]
    # 6000 to 8000, 9000 to 11000, 12000 to 18000 and 19000 to 21000 ns: 12 us in two steps
    assert idle_us_per_step(prompt + steps) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void a::b::(anonymous namespace)::f<__half, 8>(a::Args const&, int)", "f<__half, 8>"),
        ("nvjet_sm90_hsh_128x8", "nvjet_sm90_hsh_128x8"),
        ("void g(int*)", "g"),
    ],
)
def test_names_lose_what_is_not_theirs(name: str, short: str) -> None:
    assert short_name(name) == short
