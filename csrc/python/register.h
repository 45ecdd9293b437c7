// One register_* function per area; module.cc only calls them.
#pragma once

#include <pybind11/pybind11.h>

namespace turbomill::python {

void register_system(pybind11::module_& m);        // build_info, cpu_features, load_blas
void register_configs(pybind11::module_& m);       // ModelConfig, EngineConfig, TensorRef
void register_engine(pybind11::module_& m);        // Request, Output, Metrics, Engine
void register_repack(pybind11::module_& m);        // the submodule `repack`, for the converter
void register_harness(pybind11::module_& m);       // the submodule `harness`, for tests
void register_kernels(pybind11::module_& m);       // the submodule `kernels`, for tests and benchmarks
void register_kernels_cuda(pybind11::module_& m);  // likewise `kernels_cuda`, when CUDA is built in
// Parts of `kernels_cuda`.
void register_kernels_cuda_linear(pybind11::module_& m);
void register_kernels_cuda_attention(pybind11::module_& m);
void register_kernels_cuda_moe(pybind11::module_& m);
void register_kernels_cuda_sampling(pybind11::module_& m);
void register_bench_cuda(pybind11::module_& m);  // timers on the GPU
void register_bench_cuda_moe(pybind11::module_& m);

}  // namespace turbomill::python
