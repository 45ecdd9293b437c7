// Descriptions of tensors for Hopper's copy engine.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include <string>

#include "core/dtype.h"
#include "kernels/cuda/error.h"

namespace turbomill::cuda {

// The driver's function, found through the runtime: nothing links to the driver.
inline PFN_cuTensorMapEncodeTiled_v12000 map_encoder() {
    static const auto function = [] {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult status{};
        check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                               &status),
              "looking for cuTensorMapEncodeTiled");
        if (status != cudaDriverEntryPointSuccess)
            throw CudaError("the driver has no cuTensorMapEncodeTiled");
        return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
    }();
    return function;
}

// A tensor and the box that one copy brings, innermost dimension first; strides in bytes, of all but that
// one.
template <int Rank>
CUtensorMap make_map(CUtensorMapDataType type, const void* data, const cuuint64_t (&sizes)[Rank],
                     const cuuint64_t (&strides)[Rank - 1], const cuuint32_t (&box)[Rank],
                     CUtensorMapSwizzle swizzle) {
    CUtensorMap map;
    const cuuint32_t steps[] = {1, 1, 1, 1, 1};
    const CUresult status = map_encoder()(
        &map, type, Rank, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS)
        throw CudaError("cuTensorMapEncodeTiled failed with " + std::to_string(int(status)));
    return map;
}

inline CUtensorMapDataType map_type(DType type) {  // of 16 bits
    return type == DType::F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

}  // namespace turbomill::cuda
